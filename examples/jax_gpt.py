"""A small GPT in Flax that learns Python's standard library, byte by byte, with Strobe's attention: pip install '.[jax]' flax optax.

--beside-pytorch trains the GPT of `strobe train` from the same weights on the same batches, too, and prints both losses: pip install
'.[train]' as well."""

import argparse
import sysconfig
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import strobe.jax

VOCABULARY, WIDTH, LAYERS, HEADS, SEQUENCE, BATCH = 257, 128, 2, 4, 128, 16
INITIAL = nn.initializers.normal(0.02)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        qkv = nn.Dense(3 * WIDTH, kernel_init=INITIAL, name="qkv")(nn.LayerNorm(1e-5, name="norm_attention")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS), 2, 0)  # (B, S, H, D)
        attended = strobe.jax.attention(q, k, v, causal=True, layout="bshd")
        x = x + nn.Dense(WIDTH, kernel_init=INITIAL, name="out")(attended.reshape(x.shape))
        hidden = nn.Dense(4 * WIDTH, kernel_init=INITIAL, name="up")(nn.LayerNorm(1e-5, name="norm_mlp")(x))
        return x + nn.Dense(WIDTH, kernel_init=INITIAL, name="down")(nn.gelu(hidden, approximate=False))


class GPT(nn.Module):
    """Logits (B, S, vocabulary) of the next byte, for bytes (B, S)."""

    @nn.compact
    def __call__(self, tokens):
        token = nn.Embed(VOCABULARY, WIDTH, embedding_init=INITIAL, name="token")
        x = token(tokens) + nn.Embed(SEQUENCE, WIDTH, embedding_init=INITIAL, name="position")(jnp.arange(tokens.shape[1]))
        for n in range(LAYERS):
            x = nn.remat(Block)(name=f"block_{n}")(x)
        return token.attend(nn.LayerNorm(1e-5, name="norm")(x))


def loss_of(params, tokens):
    """Mean cross entropy, in nats, of tokens[:, 1:]."""
    logits = GPT().apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(steps):
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data, random = np.frombuffer(text, np.uint8), np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(data) - SEQUENCE - 1, BATCH)
        yield np.stack([data[n : n + SEQUENCE + 1] for n in starts]).astype(np.int32)


def of_pytorch(model):
    """The weights of PyTorch's GPT as Flax names them."""
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    dense = lambda name: {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}  # noqa: E731
    norm = lambda name: {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}  # noqa: E731
    params = {name: {"embedding": state[f"{name}.weight"]} for name in ("token", "position")} | {"norm": norm("norm")}
    for n in range(LAYERS):
        at = f"blocks.{n}"
        params[f"block_{n}"] = {name: norm(f"{at}.{name}") for name in ("norm_attention", "norm_mlp")}
        params[f"block_{n}"] |= {"qkv": dense(f"{at}.attention.qkv"), "out": dense(f"{at}.attention.out")}
        params[f"block_{n}"] |= {"up": dense(f"{at}.mlp.0"), "down": dense(f"{at}.mlp.2")}
    return jax.tree.map(jnp.array, params)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--beside-pytorch", action="store_true")
    arguments = parser.parse_args()
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(20, arguments.steps // 4), arguments.steps)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    torch_step = None
    if arguments.beside_pytorch:
        import torch

        from strobe_tools.train import model as pytorch
        from strobe_tools.train.config import Config

        torch.manual_seed(0)
        sizes = {"d_model": WIDTH, "layers": LAYERS, "heads": HEADS, "d_ff": 4 * WIDTH, "sequence": SEQUENCE}
        model = pytorch.GPT(Config(vocab_size=VOCABULARY, dropout=0.0, **sizes))
        params = of_pytorch(model)
        adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

        def torch_step(n, tokens):
            adam.param_groups[0]["lr"] = float(rate(n))
            adam.zero_grad()
            loss = model.loss(torch.from_numpy(tokens).long())
            loss.backward()
            adam.step()
            return loss.item()
    else:
        params = GPT().init(jax.random.key(0), jnp.zeros((1, SEQUENCE), jnp.int32))["params"]

    @jax.jit
    def step(params, state, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, most, began = optimizer.init(params), 0.0, time.perf_counter()
    for n, tokens in enumerate(batches(arguments.steps)):
        params, state, loss = step(params, state, tokens)
        words = f"step {n:4}  loss {float(loss):.4f}"
        if torch_step is not None:
            of_torch = torch_step(n, tokens)
            most = max(most, abs(of_torch - float(loss)))
            words += f"  PyTorch {of_torch:.4f}"
        if n % 20 == 0 or n == arguments.steps - 1:
            print(f"{words}  {time.perf_counter() - began:.1f} s", flush=True)
    if torch_step is not None:
        print(f"largest difference of the losses: {most:.2g}")


if __name__ == "__main__":
    main()
