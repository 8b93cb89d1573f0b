from hypothesis import settings

# How long one example takes says nothing on a shared machine; how many there are does.
settings.register_profile("cocofl", deadline=None)
settings.load_profile("cocofl")
