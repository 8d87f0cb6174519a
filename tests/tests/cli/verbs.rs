//! Commands of `vgpuctl` with the real daemon.

use std::fs;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::vgpuctl::{refused, run, vgpuctl, vgpuctl_json};
use system_tests::{Vgpud, wait_for};

#[test]
fn a_vgpu_is_managed_with_mdevctls_verbs() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=4G"])?;
    let ctl = |line: &str| vgpuctl(&vgpud, line);
    let types = vgpuctl_json(&vgpud, "types --dumpjson")?;
    let offered = types[0]["soft0"].as_array().context("No list of types")?;
    let one = offered.iter().find_map(|one| one.get("SOFT-1Q")).context("No SOFT-1Q")?;
    assert_eq!(one["available_instances"], 4);

    let uuid = ctl("define -p soft0 -t SOFT-1Q --auto")?;
    assert_eq!(ctl("list")?, "");
    assert_eq!(ctl("list -d")?, format!("{uuid} soft0 SOFT-1Q auto"));
    ctl(&format!("modify -u {uuid} --manual"))?;
    ctl(&format!("modify -u {uuid} --addattr core --value 80"))?;
    let file = fs::read(vgpud.config_dir().join("soft0").join(&uuid))?;
    let definition =
        json!({ "mdev_type": "SOFT-1Q", "start": "manual", "attrs": [{ "core": "80" }] });
    assert_eq!(serde_json::from_slice::<Value>(&file)?, definition);
    assert_eq!(vgpuctl_json(&vgpud, &format!("list -d -u {uuid} --dumpjson"))?, definition);

    ctl(&format!("start -u {uuid}"))?;
    assert!(vgpud.vfio_socket(&uuid).exists(), "the socket is ready when start returns");
    assert_eq!(ctl("list")?, format!("{uuid} soft0 SOFT-1Q manual (defined)"));
    assert_eq!(ctl("list -d")?, format!("{uuid} soft0 SOFT-1Q manual (active)"));
    let stats = vgpuctl_json(&vgpud, "stats --output json")?;
    assert_eq!(
        (&stats["vgpus"][0]["uuid"], &stats["vgpus"][0]["share_asked"]),
        (&json!(uuid), &json!(80))
    );
    assert!(ctl("stats")?.contains(&uuid));

    ctl(&format!("modify -u {uuid} --attr core=60 --live"))?;
    let stats = vgpuctl_json(&vgpud, &format!("stats -u {uuid} --output json"))?;
    assert_eq!(stats["vgpus"][0]["share_asked"], 60);
    // Live changes accumulate and leave the definition unchanged.
    ctl(&format!("modify -u {uuid} --attr priority=high --live"))?;
    let stats = vgpuctl_json(&vgpud, &format!("stats -u {uuid} --output json"))?;
    let kept = (&stats["vgpus"][0]["share_asked"], &stats["vgpus"][0]["priority"]);
    assert_eq!(kept, (&json!(60), &json!("high")));
    assert_eq!(vgpuctl_json(&vgpud, &format!("list -d -u {uuid} --dumpjson"))?, definition);

    ctl(&format!("stop -u {uuid}"))?;
    assert_eq!(ctl("list")?, "");
    ctl(&format!("undefine -u {uuid}"))?;
    assert_eq!(ctl("list -d")?, "");
    assert!(!vgpud.config_dir().join("soft0").join(&uuid).exists());
    Ok(())
}

#[test]
fn a_stopped_transient_vgpu_is_gone_unless_it_was_defined() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let ctl = |line: &str| vgpuctl(&vgpud, line);
    let gone = vgpuctl_json(&vgpud, "start -p soft0 -t SOFT-256MC --attr core=20 --output json")?;
    assert_eq!((&gone["state"], &gone["live_attrs"][0]["core"]), (&json!("running"), &json!("20")));
    let gone = gone["uuid"].as_str().context("No uuid")?.to_owned();
    let kept = "7f0c1e6a-2b1d-4a55-9d53-5c0f8e1a0001";
    assert_eq!(ctl(&format!("start -u {kept} -p soft0 -t SOFT-256MQ"))?, "");
    ctl(&format!("define -u {kept}"))?;
    ctl(&format!("stop -u {gone}"))?;
    ctl(&format!("stop -u {kept}"))?;
    assert_eq!(ctl("list")?, "");
    assert_eq!(ctl("list -d")?, format!("{kept} soft0 SOFT-256MQ manual"));
    refused(&vgpud, &format!("start -u {gone}"), 4, "There is no vGPU")
}

#[test]
fn qemu_arguments_name_the_vgpus_socket() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpuctl(&vgpud, "define -p soft0 -t SOFT-256MQ")?;
    let socket = vgpud.vfio_socket(&uuid);
    for _ in ["before the start", "after the start"] {
        let device: Value = vgpuctl_json(&vgpud, &format!("qemu-args -u {uuid} --device"))?;
        assert_eq!(device["socket"]["path"], socket.to_str().context("The path is not UTF-8")?);
        let xml = vgpuctl(&vgpud, &format!("libvirt-xml -u {uuid}"))?;
        assert!(xml.contains(&socket.display().to_string()), "{xml}");
        if !socket.exists() {
            vgpuctl(&vgpud, &format!("start -u {uuid}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_definition_is_copied_by_its_file() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let first =
        vgpuctl(&vgpud, "define -p soft0 -t SOFT-1Q -a --attr core=30 --attr doorbell=trapped")?;
    let text = vgpuctl(&vgpud, &format!("list -d -u {first} --dumpjson"))?;
    let file = vgpud.run_dir().join("definition.json");
    fs::write(&file, &text)?;
    let second = vgpuctl(&vgpud, &format!("define -p soft0 --jsonfile {}", file.display()))?;
    assert_ne!(first, second);
    assert_eq!(vgpuctl(&vgpud, &format!("list -d -u {second} --dumpjson"))?, text);
    Ok(())
}

#[test]
fn definitions_survive_the_managers_death() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuid = vgpuctl(&vgpud, "define -p soft0 -t SOFT-1Q --attr core=80")?;
    // A socket that was deleted is told apart from a manager that does not run.
    fs::remove_file(vgpud.api_socket())?;
    let pid = vgpud.pid().context("No process")?;
    refused(&vgpud, "list", 3, &format!("vgpud (process {pid}) runs, but its socket"))?;
    vgpud.end(Signal::SIGKILL)?;
    refused(&vgpud, "list", 3, "Cannot reach vgpud")?;
    vgpud.start_again()?;
    assert_eq!(vgpuctl(&vgpud, "list -d")?, format!("{uuid} soft0 SOFT-1Q manual"));
    Ok(())
}

#[test]
fn mistakes_get_one_line_and_a_distinct_status() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=1G"])?;
    let refused = |line: &str, status, words: &str| refused(&vgpud, line, status, words);
    refused("define -p soft0 -t SOFT-1QQ", 4, "it offers SOFT-256MQ")?;
    refused("define -p soft9 -t SOFT-1Q", 4, "soft9")?;
    refused(
        "define -p soft0 -t SOFT-1Q --attr core=101",
        2,
        "is 1 to 100 hundredths, not \"101\"",
    )?;
    refused("define -p soft0 -t SOFT-1Q --attr cores=1", 2, "there are name, core, mode")?;
    refused("stop -u 7f0c1e6a-2b1d-4a55-9d53-5c0f8e1a0002", 4, "There is no vGPU")?;

    let uuid = vgpuctl(&vgpud, "start -p soft0 -t SOFT-512MQ --attr core=80")?;
    refused(&format!("start -u {uuid}"), 5, "is running already")?;
    refused("start -p soft0 -t SOFT-256MQ --attr core=30", 5, "20 of 100 left")?;
    refused("start -p soft0 -t SOFT-1C", 5, "MiB free")?;
    let vm = UnixStream::connect(vgpud.vfio_socket(&uuid))?;
    wait_for("a VM is attached", || vgpud.show(&uuid).is_ok_and(|vgpu| !vgpu["vm"].is_null()))?;
    refused(&format!("stop -u {uuid}"), 5, "is used by process")?;
    vgpuctl(&vgpud, &format!("stop -u {uuid} --force"))?;
    drop(vm);

    let headless = vgpuctl(&vgpud, "start -p soft0 -t SOFT-256MC")?;
    refused(&format!("screenshot -u {headless} -o /dev/null"), 5, "no display head")?;
    assert_eq!(run(&vgpud, "start")?.status, 2);
    Ok(())
}
