"""Services, which answer environments' `Ask` requests in the main process.

reward_model_service   scores texts and replies with a model of this machine
judge                  calls a language model behind an OpenAI-compatible endpoint (`posttrain.system.endpoint`)
generative_judge       samples a checkpoint of this machine that reasons before its verdict
judge_prompt           requests to judges, and the parsing of their answers
judge_recipe           the settings of a judge
answer_cache           answers of endpoints on disk, for all runs
retriever, retrieval   search over passages
"""
