"""Reinforcement learning: replay buffers, environments and datasets that read from them."""

import random
from collections import OrderedDict, deque, namedtuple

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

Experience = namedtuple(
    "Experience", field_names=["state", "action", "reward", "done", "new_state"]
)


class CartOnALine:
    """An environment: a cart that is to stay near 0.

    It has a generator of its own, as gymnasium's have.
    """

    def __init__(self, seed=0):
        self.np_random = np.random.default_rng(seed)

    def reset(self):
        self.position, self.steps = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32), 0
        return self.position

    def step(self, action):
        self.steps += 1
        push = np.float32(0.1 if action else -0.1) + np.float32(0.02 * self.np_random.normal())
        self.position = np.array(
            [self.position[0] + self.position[1], self.position[1] + push], np.float32
        )
        done = bool(abs(self.position[0]) > 1 or self.steps > 15)
        return self.position, 1.0 - abs(float(self.position[0])), done


class ReplayBuffer:
    """examples/pytorch/domain_templates/reinforce_learn_Qnet.py."""

    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def __len__(self):
        return len(self.buffer)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, batch_size):
        indices = np.random.choice(len(self.buffer), batch_size, replace=False)
        states, actions, rewards, dones, next_states = zip(
            *(self.buffer[idx] for idx in indices), strict=True
        )
        return (
            np.array(states),
            np.array(actions),
            np.array(rewards, dtype=np.float32),
            np.array(dones, dtype=bool),
            np.array(next_states),
        )


class RLDataset(IterableDataset):
    """The same example's: one draw from the buffer is an epoch."""

    def __init__(self, buffer, sample_size=200):
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self):
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size)
        for i in range(len(dones)):
            yield states[i], actions[i], rewards[i], dones[i], new_states[i]


class Agent:
    """The same example's."""

    def __init__(self, env, replay_buffer):
        self.env, self.replay_buffer = env, replay_buffer
        self.reset()

    def reset(self):
        self.state = self.env.reset()

    @torch.no_grad()
    def play_step(self, net, epsilon=0.0):
        if np.random.random() < epsilon:
            action = random.randint(0, 1)
        else:
            action = int(net(torch.tensor(self.state)[None]).argmax())
        new_state, reward, done = self.env.step(action)
        self.replay_buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = new_state
        if done:
            self.reset()
        return reward, done


class DQN(LightningModule):
    """The same example's."""

    def __init__(
        self,
        sync_rate: int = 5,
        replay_size: int = 60,
        warm_start_size: int = 40,
        episode_length: int = 40,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer = ReplayBuffer(replay_size)
        self.agent = Agent(CartOnALine(), self.buffer)
        self.total_reward = 0
        self.episode_reward = 0
        for _ in range(warm_start_size):
            self.agent.play_step(self.net, epsilon=1.0)

    def training_step(self, batch, nb_batch):
        epsilon = max(0.01, 1.0 - self.global_step / 20)
        reward, done = self.agent.play_step(self.net, epsilon)
        self.episode_reward += reward
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long()[:, None]).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        loss = nn.functional.mse_loss(values, next_values.detach() * 0.9 + rewards)
        if done:
            self.total_reward = self.episode_reward
            self.episode_reward = 0
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict(
            {"reward": reward, "train_loss": loss, "total_reward": float(self.total_reward)}
        )
        return OrderedDict({"loss": loss})

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer, self.hparams.episode_length), batch_size=4)


class Rollout(IterableDataset):
    """Experience as the agent makes it: each sample plays a step with the network as it is now."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        for _ in range(40):
            self.module.agent.play_step(self.module.net, 0.3)
            yield self.module.agent.replay_buffer.buffer[-1]


class OnPolicy(DQN):
    """A stream that depends on the weights."""

    def train_dataloader(self):
        return DataLoader(Rollout(self), batch_size=4)


class Arrays:
    """A ring of numpy arrays, with priorities."""

    def __init__(self, capacity=64):
        self.states = np.zeros((capacity, 2), np.float32)
        self.rewards = np.zeros(capacity, np.float32)
        self.priorities = np.zeros(capacity)
        self.at = self.filled = 0

    def add(self, state, reward):
        self.states[self.at], self.rewards[self.at] = state, reward
        self.priorities[self.at] = self.priorities.max() or 1.0
        self.at = (self.at + 1) % len(self.states)
        self.filled = min(self.filled + 1, len(self.states))

    def sample(self, rng, n):
        p = self.priorities[: self.filled] / self.priorities[: self.filled].sum()
        chosen = rng.choice(self.filled, n, p=p)
        return chosen, torch.from_numpy(self.states[chosen]), torch.from_numpy(self.rewards[chosen])


class ValueLearner(LightningModule):
    """Prioritized replay in numpy arrays, sampled in the step by a generator of its own.

    The loader only counts.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.env, self.buffer, self.rng = CartOnALine(3), Arrays(), np.random.default_rng(8)
        self.state = self.env.reset()
        self.returns = []

    def training_step(self, batch, batch_idx):
        new_state, reward, done = self.env.step(self.rng.integers(2))
        self.buffer.add(self.state, reward)
        self.state = self.env.reset() if done else new_state
        self.returns.append(reward)
        chosen, states, rewards = self.buffer.sample(self.rng, 4)
        errors = (self.net(states)[:, 0] - rewards) ** 2
        self.buffer.priorities[chosen] = errors.detach().numpy() + 1e-3
        self.log("average_return", np.mean(self.returns[-10:]))
        return errors.mean() + 0.0 * batch[0].sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class ReplayDataset(torch.utils.data.Dataset):
    """A map-style dataset over a list that the module appends to while it trains."""

    def __init__(self):
        self.memory = [(torch.tensor([k / 9, 1.0]), torch.tensor(k % 3)) for k in range(8)]

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, index):
        return self.memory[index]


class Collector(LightningModule):
    """Each step adds a sample that depends on the weights.

    An epoch draws from the samples so far, with replacement.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.1), nn.Linear(16, 3))
        self.dataset = ReplayDataset()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        new = (logits.detach()[0, :2] + 0.1 * torch.randn(2)).clamp(-2, 2)
        self.dataset.memory.append((new, logits.detach()[0].argmax()))
        return nn.functional.cross_entropy(logits, y)

    def train_dataloader(self):
        sampler = torch.utils.data.RandomSampler(self.dataset, replacement=True, num_samples=36)
        return DataLoader(self.dataset, batch_size=4, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
