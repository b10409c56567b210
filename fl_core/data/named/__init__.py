"""The datasets by name. To add one, put a file with a function under :func:`fl_core.data.dataset` here.

Training-time augmentation is not part of a dataset.
"""
