"""Tensors and events of PyTorch between two processes, and long waits, for the benchmark `gpu`:
prints lines of a name and 1 if the values are right."""

import time

import torch
import torch.multiprocessing as mp

ROUNDS = 30


def other(orders, answers):
    """Adds 1 to the shared tensor in each round, then waits for the first process's event."""
    shared = orders.get()
    for _ in range(ROUNDS):
        orders.get()
        shared.add_(1)
        torch.cuda.synchronize()
        answers.put(float(shared[-1]))
    handle, values = orders.get()
    event = torch.cuda.Event.from_ipc_handle(0, handle)
    torch.cuda.current_stream().wait_event(event)
    copy = values.clone()
    answers.put((float(copy[0]), float(copy[-1])))
    del shared, values, copy, event
    orders.get()


def tensors(orders, answers):
    """Returns whether both processes see each other's stores."""
    shared = torch.zeros(1 << 20, device="cuda")
    orders.put(shared)
    want, right = 0.0, True
    for number in range(ROUNDS):
        orders.put(number)
        there = answers.get(timeout=60)
        want += 1
        mean = float(shared.sum(dtype=torch.float64)) / shared.numel()
        right &= there == want == float(shared[-1]) == mean
        shared.mul_(2).remainder_(1000)
        torch.cuda.synchronize()
        want = want * 2 % 1000
    return right


def event(orders, answers, values):
    """Returns whether the other process waits for work of this one."""
    done = torch.cuda.Event(interprocess=True)
    handle = done.ipc_handle()
    torch.cuda._sleep(int(2.5e9))
    values.fill_(42)
    done.record()
    orders.put((handle, values))
    return answers.get(timeout=60) == (42.0, 42.0)


def waits(values):
    """Returns whether waits end after the work, also those of some seconds."""
    right = True
    for seconds in (0.6, 1.6, 3.0):
        values.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(seconds * 1.9e9))
        values.fill_(1)
        torch.cuda.current_stream().synchronize()
        started = time.perf_counter()
        right &= bool((values == 1).all())
        right &= time.perf_counter() - started < 0.3
    return right


def main():
    """Runs all, with a second process."""
    mp.set_start_method("spawn")
    orders, answers = mp.Queue(), mp.Queue()
    process = mp.Process(target=other, args=(orders, answers))
    process.start()
    print("shared_tensors", int(tensors(orders, answers)), flush=True)
    values = torch.zeros(1 << 22, device="cuda")
    print("shared_event", int(event(orders, answers, values)), flush=True)
    print("long_waits", int(waits(values)), flush=True)
    orders.put(0)
    process.join(30)


if __name__ == "__main__":
    main()
