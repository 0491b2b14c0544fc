import faults_support as fs
import fastpersist as fp, os, time

def _hello(x):
    import fastpersist._core
    return x + 1

def _raise():
    raise ValueError("x")

def _mount(kind):
    with fs.mounted(kind, 320 if kind == "xfs" else 128 if kind=="btrfs" else 32) as folder:
        s = fs.state_of(300_000)
        t=time.time()
        i = fp.save(s, folder + "/a.pt")
        assert fs.content(folder + "/a.pt") == fs.torch_bytes(s, "a.pt")
        return kind, i, i.engine_reason, time.time()-t

def test_a():
    for _ in range(3):
        t = time.time(); assert fs.run(_hello, 2) == 3; print(time.time() - t)
    for k in ("ext2", "ext4", "xfs", "btrfs", "tmpfs", "overlay"):
        t = time.time(); print(fs.run(_mount, k, mounts=True)); print(time.time() - t)

