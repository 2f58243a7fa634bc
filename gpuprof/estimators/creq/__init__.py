"""Creq and Mreq of models that no profiler saw: how their kernels will be launched, learned from published launches."""
