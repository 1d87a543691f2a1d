"""What networks give a guide's factors: what the networks read, their passes, and what adds to their outputs."""
