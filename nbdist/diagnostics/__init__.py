"""%dist_doctor: whether a machine is fit for ranks, and what to do where it is not."""
