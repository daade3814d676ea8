"""Services: who answers what environments ask with `Ask`, in the main process.

reward_model   scores texts and replies with a model of this machine
judge          asks a language model behind an OpenAI-compatible endpoint, by a recipe
generative     samples a checkpoint of this machine that reasons before its verdict, by a recipe
endpoint       calls of such endpoints: many at once, again where that helps, bounded in rate
cache          answers of endpoints on disk, for all runs
opening        the services of a verb's options
"""
