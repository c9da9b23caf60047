"""`look`: what is inside a trained network, as a page and as figures."""
