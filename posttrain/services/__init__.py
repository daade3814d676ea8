"""Services, which answer environments' `Ask` requests in the main process.

reward_model   scores texts and replies with a model of this machine
judge          asks a language model behind an OpenAI-compatible endpoint (`posttrain.system.endpoint`), by a recipe
generative     samples a checkpoint of this machine that reasons before its verdict, by a recipe
judging        what judges are asked, and how their answers are read
recipe         what a recipe may say
cache          answers of endpoints on disk, for all runs
"""
