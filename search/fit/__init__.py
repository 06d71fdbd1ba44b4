"""Small extras that are trained once for a target."""
