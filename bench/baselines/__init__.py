"""Baselines that the seed papers compare with: AlpaServe, MIG-serving, PARIS and ELSA, Shepherd.

Plug-ins, run as ``gpuprof compare --policy bench.baselines.shepherd:Shepherd`` from the root of the repository.
"""
