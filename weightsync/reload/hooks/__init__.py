"""Post-load hooks: run once per reload, in the loader's order, in the world that the first load's hooks found.

    post_load       which hooks there are, in which order, and the guard that runs each once
    runner          runs them over what was staged or over the live model, and settles the results
    reconcile       results into live storage: values move, addresses don't

The world that they find:

    scopes, swap    a model's Python side as values; puts recorded values in place of the live ones, and back
    world           what hooks find as recorded outside of the staged tensors
    observe         which tensors a hook read and wrote, which attributes it set

Whose a value is, a hook's own or the engine's:

    first_load      seen around each hook of the first load
    logs            counts and lists that only grow belong to nobody
    trial           where nobody saw the first load: by running hooks in a reload more than once
    live_names, registered    what the engine put there, and what hooks register with torch

    lazy_caches, lazy_bindings    what forward builds on first use: emptied, and rebuilt at its address
"""
