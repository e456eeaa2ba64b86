"""What the parts of Lastwords say to each other: messages, files, piece table. Pure, standard library only."""
