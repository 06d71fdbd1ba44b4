"""Small extras of a target, trained once: a corpus of its own text, and what is distilled from it."""
