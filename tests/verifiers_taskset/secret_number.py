"""A taskset of the `verifiers` library: guess a number below 10 in three tries, each answered by higher or lower."""

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    secret: int


class NumberTask(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for secret in range(10):
            yield NumberTask(NumberData(secret=secret, prompt="Guess my number."), self.config.task)


class NumberEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class NumberEnv(vf.Env[NumberEnvConfig]):
    async def run(self, task, agents):
        found = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or str(task.data.secret) in segment.last_reply:
                    break
                segment = await interaction.turn("higher")
            found = float(str(task.data.secret) in segment.last_reply)
        interaction.trace.record_reward("found", found, 1.0)


__all__ = ["NumberEnv", "NumberTaskset"]
