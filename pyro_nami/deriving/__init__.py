"""Conditionals that the model gives: in closed form, about a mode, or by quadrature; and what refutes them."""
