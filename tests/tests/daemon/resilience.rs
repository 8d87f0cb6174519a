//! Running VMs and definitions survive wrong commands and crashes of the manager.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::vgpuctl::{run, vgpuctl};
use system_tests::{Vgpud, wait_for};

/// Connects to a vGPU's socket as a VM's process does.
fn attach(vgpud: &Vgpud, uuid: &str) -> Result<UnixStream> {
    let vm = UnixStream::connect(vgpud.vfio_socket(uuid))?;
    wait_for("a VM is attached", || vgpud.show(uuid).is_ok_and(|vgpu| !vgpu["vm"].is_null()))?;
    Ok(vm)
}

#[test]
fn wrong_commands_do_not_affect_a_running_vm() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=1G"])?;
    let uuid = vgpuctl(&vgpud, "define -p soft0 -t SOFT-512MQ --attr core=60")?;
    vgpuctl(&vgpud, &format!("start -u {uuid}"))?;
    let vm = attach(&vgpud, &uuid)?;
    let file = vgpud.run_dir().join("other.json");
    fs::write(&file, r#"{"mdev_type":"SOFT-256MC","start":"auto","attrs":[{"core":"1"}]}"#)?;
    let file = file.display();
    let of_vm = |vgpu: &Value| -> Value {
        ["pid", "vm", "live_attrs", "live_type", "state", "parent"]
            .map(|name| vgpu[name].clone())
            .to_vec()
            .into()
    };
    let before = of_vm(&vgpud.show(&uuid)?);
    assert_eq!(before[1]["pid"], std::process::id());
    for (line, status) in [
        // Commands for the stopped vGPU, which succeed.
        (format!("modify -u {uuid} --attr core=5"), 0),
        (format!("modify -u {uuid} -t SOFT-256MC --auto"), 0),
        (format!("modify -u {uuid} -p soft0 --jsonfile {file}"), 0),
        (format!("modify -u {uuid} --delattr"), 0),
        (format!("undefine -u {uuid}"), 0),
        // Wrong commands.
        (format!("undefine -u {uuid}"), 5),
        (format!("stop -u {uuid}"), 5),
        (format!("start -u {uuid}"), 5),
        (format!("start -u {uuid} -p soft0 --jsonfile {file}"), 5),
        (format!("start -u {uuid} -t SOFT-1Q"), 2),
        (format!("modify -u {uuid} --live --attr core=101"), 2),
        (format!("modify -u {uuid} --live --attr core=1 --attr hang_timeout=never"), 2),
        (format!("modify -u {uuid} --live --attr core=1 --attr doorbell=trapped"), 5),
        (format!("modify -u {uuid} --live --jsonfile {file}"), 2),
        (format!("modify -u {uuid} --live -t SOFT-256MC"), 2),
        (format!("modify -u {uuid} --live --defined --attr core=1"), 5),
        (format!("modify -u {uuid} --attr core=1"), 5),
        (format!("modify -u {uuid} --live --addattr core --value 2"), 2),
        (format!("modify -u {uuid} --live --delattr --index 7"), 2),
        ("scheduler -p soft0 --timeslice 1000".into(), 2),
        ("scheduler -p soft0 --frequency 9999".into(), 2),
        ("start -p soft0 -t SOFT-1Q".into(), 5),
        ("start -p soft0 -t SOFT-256MQ --attr core=50".into(), 5),
        (format!("define -u {uuid} -p soft0 -t SOFT-9Q"), 4),
        (format!("stop -u {uuid}"), 5),
    ] {
        let done = run(&vgpud, &line)?;
        ensure!(done.status == status, "{line}: {done:?}, expected {status}");
        let after = of_vm(&vgpud.show(&uuid)?);
        assert_eq!(after, before, "after {line}");
    }
    // The VM is still served.
    vm.set_nonblocking(true)?;
    let end = (&vm).read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(end, Err(std::io::ErrorKind::WouldBlock), "the connection is open");
    Ok(())
}

/// Environment variable with the socket that the helper process connects to.
const SOCKET: &str = "ATTACHES_AS_A_VM_TO";

/// Not a test by itself: the next test starts this one in a separate process.
#[test]
fn helper_process_attaches_as_a_vm() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let _vm = UnixStream::connect(socket).unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn stopping_a_vgpu_in_use_names_its_vm() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpuctl(&vgpud, "start -p soft0 -t SOFT-256MQ")?;
    let mut vm = Command::new(std::env::current_exe()?)
        .args(["--exact", "resilience::helper_process_attaches_as_a_vm"])
        // Arguments of QEMU under libvirt, which libtest ignores.
        .args(["--skip", "-name", "guest=web1,debug-threads=on"])
        .env(SOCKET, vgpud.vfio_socket(&uuid))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    wait_for("the VM is attached", || vgpud.show(&uuid).is_ok_and(|vgpu| !vgpu["vm"].is_null()))?;
    let (pid, user) = (vm.id(), nix::unistd::User::from_uid(nix::unistd::geteuid())?);
    let user = user.context("This user has no name")?.name;
    let done = run(&vgpud, &format!("stop -u {uuid}"))?;
    let command = fs::read_to_string(format!("/proc/{pid}/comm"))?;
    let expected = format!(
        "vgpuctl: vGPU {uuid} is used by process {pid} (\"{}\") of user {user}, VM \"web1\"; \
         shut that VM down first, or use --force\n",
        command.trim_end()
    );
    assert_eq!((done.status, done.stderr), (5, expected));
    vgpuctl(&vgpud, &format!("stop -u {uuid} --force"))?;
    drop(vm.stdin.take());
    assert!(vm.wait()?.success());
    Ok(())
}

/// A change of one vGPU's definition: before and after.
type Change = (String, Option<Value>, Option<Value>);

/// Changes definitions until the manager dies. Reports each change before it starts and after it
/// succeeds.
fn change_until_it_dies(
    vgpud: &Vgpud,
    round: u64,
    mut defined: BTreeMap<String, Value>,
    changes: &mpsc::Sender<(Change, bool)>,
) {
    for turn in 0_u64.. {
        let uuid = format!("5d3c7a52-7c3f-4d43-b1a9-0000000000{:02x}", turn * 7 % 5);
        let old = defined.get(&uuid).cloned();
        let attrs = json!([{ "core": (turn % 20 + 1).to_string() }, { "refresh": (round + 1).to_string() }]);
        let path = format!("/v1/vgpus/{uuid}");
        let (new, answer) = match (&old, turn % 3) {
            (None, _) => {
                let request = json!({ "uuid": uuid, "parent": "soft0", "mdev_type": "SOFT-256MC",
                    "attrs": attrs, "define": true });
                (Some(attrs), ("POST", "/v1/vgpus".to_owned(), Some(request)))
            }
            (Some(_), 0) => (None, ("DELETE", path, None)),
            (Some(_), _) => (Some(attrs.clone()), ("PATCH", path, Some(json!({ "attrs": attrs })))),
        };
        let change = (uuid.clone(), old, new.clone());
        if changes.send((change.clone(), false)).is_err() {
            return;
        }
        let (method, path, body) = answer;
        if vgpud.call(method, &path, body.as_ref()).is_err() {
            return;
        }
        match new {
            Some(attrs) => drop(defined.insert(uuid, attrs)),
            None => drop(defined.remove(&uuid)),
        }
        let _ = changes.send((change, true));
    }
}

#[test]
fn definitions_are_consistent_whenever_the_manager_is_killed() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let mut defined = BTreeMap::new();
    let mut done = 0;
    for round in 0..15 {
        let (sender, changes) = mpsc::channel();
        let pid = vgpud.pid().context("It runs")?;
        let known = defined.clone();
        let reports = std::thread::scope(|scope| {
            let served = &vgpud;
            scope.spawn(move || change_until_it_dies(served, round, known, &sender));
            // Some changes are made, and the manager dies at no particular point of a later one.
            let mut reports = Vec::new();
            while reports.len() < 6 {
                reports.push(changes.recv().context("The changes have ended")?);
            }
            std::thread::sleep(Duration::from_micros(round * 1_331));
            system_tests::kill_process(pid, Signal::SIGKILL)?;
            anyhow::Ok(reports)
        })?;
        vgpud.end(Signal::SIGKILL)?;
        let mut open = None;
        for (change, is_done) in reports.into_iter().chain(changes) {
            if is_done {
                let (uuid, _, new) = change;
                match new {
                    Some(attrs) => drop(defined.insert(uuid, attrs)),
                    None => drop(defined.remove(&uuid)),
                }
                open = None;
                done += 1;
            } else {
                open = Some(change);
            }
        }
        vgpud.start_again()?;
        let listed = vgpud.get("/v1/vgpus")?;
        let found: BTreeMap<String, Value> = listed
            .as_array()
            .context("A list")?
            .iter()
            .map(|vgpu| {
                (vgpu["uuid"].as_str().unwrap_or_default().to_owned(), vgpu["attrs"].clone())
            })
            .collect();
        // An unfinished change may have happened or not.
        if let Some((uuid, old, new)) = open {
            let there = found.get(&uuid).cloned();
            ensure!(there == old || there == new, "{uuid}: {there:?}, and not {old:?} or {new:?}");
            match there {
                Some(attrs) => drop(defined.insert(uuid, attrs)),
                None => drop(defined.remove(&uuid)),
            }
        }
        assert_eq!(found, defined, "round {round}");
    }
    assert!(done > 30, "only {done} changes were made");
    Ok(())
}
