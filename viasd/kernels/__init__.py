"""Decoding passes of few tokens on a CPU by a kernel of our own, compiled on this machine when it is first needed."""
