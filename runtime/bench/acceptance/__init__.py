"""How well a drafter's rows tell which of its tokens the verifier keeps: labelled drafts, and features scored on them."""
