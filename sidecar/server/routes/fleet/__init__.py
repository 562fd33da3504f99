"""Routes by which a gateway and a trainer treat many replicas as one."""
