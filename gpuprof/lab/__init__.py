"""Laboratory for scheduling research: papers' scenarios and figures, sweeps, any policy and estimator.

- ``scenarios``: those of the papers, with published measurements as kernel databases, and those of a folder;
- ``cells``: one scenario by one policy, planned and simulated; resumable, in parallel;
- ``laboratory``: the papers' figures as tables, with any policy in them, and the functions behind ``gpuprof lab``.
"""
