"""iGniter's model: its equations, the fit of its coefficients, its profile."""
