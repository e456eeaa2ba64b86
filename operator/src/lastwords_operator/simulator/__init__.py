"""What any policy of saving would cost: failures in virtual time against the same formulas, tuner and estimator."""
