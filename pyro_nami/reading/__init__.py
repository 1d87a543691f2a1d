"""The Bayesian network that runs of a model show, its covariates and its index maps."""
