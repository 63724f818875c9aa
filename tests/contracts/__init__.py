"""What every clipper, sampler and update must obey, whoever wrote it."""
