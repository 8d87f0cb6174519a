//! The battery against a vGPU: a worker of `vgpud` on the software GPU.

use serde_json::json;
use system_tests::Vgpud;
use system_tests::raw_client::RawClient;

use crate::{battery, device, eventually, exclusive};

const TYPE: &str = "SOFT-256MQ";
const CONFIG: u32 = 7;

/// Starts a vGPU and returns its uuid and its worker's process id.
fn start(vgpud: &Vgpud) -> (String, String) {
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true })).unwrap();
    let shown = vgpud.show(&uuid).unwrap();
    let pid = shown["pid"].as_u64().unwrap_or_else(|| panic!("no pid in {shown}"));
    (uuid, pid.to_string())
}

/// Returns the anonymous resident memory of a process in KiB.
fn anonymous_kib(process: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the worker's number of descriptors once it is stable: the manager connects at some time
/// after the start.
fn settled_fds(pid: &str) -> usize {
    let (mut count, mut same) = (device::open_fds(pid), 0);
    while same < 15 {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let now = device::open_fds(pid);
        same = if now == count { same + 1 } else { 0 };
        count = now;
    }
    count
}

#[test]
fn a_vgpu_passes_the_battery_and_leaks_nothing() {
    let _exclusive = exclusive();
    let vgpud = Vgpud::start().unwrap();
    let (uuid, pid) = start(&vgpud);
    let socket = vgpud.vfio_socket(&uuid);
    let other = start(&vgpud);
    let mut neighbour = RawClient::attach(&vgpud.vfio_socket(&other.0));
    let config = neighbour.read(CONFIG, 0, 256);
    let before = settled_fds(&pid);
    for (name, check) in battery::ALL {
        check(&socket);
        eventually(name, || device::open_fds(&pid) == before);
    }
    assert!(system_tests::is_alive(pid.parse().unwrap()), "the worker lives");
    let memory = anonymous_kib(&pid);
    assert!(memory < 10 * 1024, "the worker has grown to {memory} KiB");
    assert_eq!(neighbour.read(CONFIG, 0, 256), config, "another vGPU is not affected");
}

#[test]
fn a_worker_does_not_grow_over_600_clients() {
    let _exclusive = exclusive();
    let vgpud = Vgpud::start().unwrap();
    let (uuid, pid) = start(&vgpud);
    let socket = vgpud.vfio_socket(&uuid);
    let attach = || {
        let mut client = RawClient::attach(&socket);
        client.read(CONFIG, 0, 256);
    };
    let fds = settled_fds(&pid);
    (0..100).for_each(|_| attach());
    let memory = anonymous_kib(&pid);
    (0..500).for_each(|_| attach());
    eventually("as many descriptors as before", || device::open_fds(&pid) == fds);
    let grown = anonymous_kib(&pid).saturating_sub(memory);
    assert!(grown < 512, "500 clients cost {grown} KiB");
}
