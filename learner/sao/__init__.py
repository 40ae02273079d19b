"""SAO (arXiv 2607.07508) as pure torch functions: tensors in, tensors out, nothing else.

Everything works on action tokens only: 1-D tensors of shape (T,) in the order they were sampled, or (T, V) where the
whole vocabulary is needed. Observation tokens have been dropped before; they never enter a formula.
"""
