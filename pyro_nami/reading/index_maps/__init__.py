"""Index maps: through which index the sites of one plate read the latents of another; found, nested, or given."""
