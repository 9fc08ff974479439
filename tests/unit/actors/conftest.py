from hypothesis import HealthCheck, settings

# Examples are checked for what they do, not for how long a busy machine takes over one.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
