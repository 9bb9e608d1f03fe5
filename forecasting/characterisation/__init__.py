"""What kinds of workloads there are: features that matter, batch-size curves, clusters, and interference between them.

Pure: tables in, plain results out. Reading files is ``cotenant.forecasting.datasets``. Only ``coldstart`` is meant for
a running system and it needs nothing but numpy; the other modules import pandas, scipy and scikit-learn.
"""
