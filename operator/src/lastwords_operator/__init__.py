"""The operator of Lastwords: decides what happens to a training job, in a cluster and on one machine alike."""
