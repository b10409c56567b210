from tests import processor as processor  # before any test module loads torch or numpy
