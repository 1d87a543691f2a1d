"""What a model is: runs of it, the network that they show, its covariates, index maps and closed forms."""
