"""Laboratory for scheduling research: papers' scenarios and figures, sweeps, any policy and estimator.

- ``publications``: published measurements as kernel databases;
- ``suites``: scenarios, those of the papers and those of a folder;
- ``cells``: one scenario by one policy, planned and simulated; resumable, in parallel;
- ``figures``: the papers' figures as tables, with any policy in them;
- ``laboratory``: the functions behind ``gpuprof lab``.
"""
