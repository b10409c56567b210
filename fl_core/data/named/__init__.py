"""The datasets by name: a file here with a function under :func:`fl_core.data.dataset` is one more.

Training-time augmentation is not part of a dataset.
"""
