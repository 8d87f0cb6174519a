//! Names of vGPUs with the real daemon.

use std::fs;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::Vgpud;
use system_tests::vgpuctl::{refused, run, vgpuctl, vgpuctl_json};

#[test]
fn a_name_is_given_in_place_of_a_uuid() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let log = dir.path().join("log");
    let vgpud = Vgpud::start_with_log(&[], &log)?;
    let ctl = |line: &str| vgpuctl(&vgpud, line);
    let uuid = ctl("define -t SOFT-256MQ --name web1 --core 40")?;
    assert_eq!(ctl("list -d web1")?, format!("{uuid} soft0 SOFT-256MQ manual (named web1)"));
    ctl("start web1")?;
    assert_eq!(
        ctl("list -u web1")?,
        format!("{uuid} soft0 SOFT-256MQ manual (named web1, defined)")
    );
    let stats = vgpuctl_json(&vgpud, "stats web1 --output json")?;
    assert_eq!(
        (&stats["vgpus"][0]["name"], &stats["vgpus"][0]["uuid"]),
        (&json!("web1"), &json!(uuid))
    );
    assert!(ctl("stats")?.contains("\nweb1 "), "{}", ctl("stats")?);
    let device = vgpuctl_json(&vgpud, "qemu-args web1 --device")?;
    assert_eq!(device["socket"]["path"], json!(vgpud.vfio_socket(&uuid)));
    refused(&vgpud, "screenshot web1 -o none.png", 5, "The screen is off")?;
    let metrics = String::from_utf8(vgpud.request("GET", "/metrics", None)?.1)?;
    assert!(
        metrics.contains(&format!(
            "name=\"web1\",parent=\"soft0\",type=\"SOFT-256MQ\",vgpu=\"{uuid}\""
        ))
    );
    refused(&vgpud, "start web1", 5, &format!("vGPU {uuid} (web1) is running already"))?;
    let title = fs::read(format!("/proc/{}/cmdline", vgpud.show("web1")?["pid"]))?;
    assert!(title.starts_with(format!("vgpud[{uuid} web1]").as_bytes()));

    // A new name is in force at once, for the definition and for the running vGPU.
    ctl("modify web1 --name web2")?;
    refused(&vgpud, "stop web1", 4, "There is no vGPU web1")?;
    let vgpu = vgpud.show("web2")?;
    assert_eq!((&vgpu["name"], &vgpu["uuid"]), (&json!("web2"), &json!(uuid)));
    assert_eq!(vgpu["live_attrs"], json!([{ "core": "40" }, { "name": "web2" }]));
    refused(&vgpud, "modify web2 --live --name web3", 5, "is that of its definition")?;
    ctl("modify web2 --live --core 30")?;
    ctl("stop web2")?;
    ctl("undefine web2")?;
    assert_eq!(ctl("list -d")?, "");
    let log = fs::read_to_string(&log)?;
    for line in [
        format!("vGPU {uuid} (web1) of type SOFT-256MQ runs"),
        format!("vGPU {uuid} (web2) is stopped"),
    ] {
        assert!(log.contains(&line), "{line}: {log}");
    }
    Ok(())
}

#[test]
fn names_are_unique_on_a_host() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0", "--parent", "soft:soft1"])?;
    let ctl = |line: &str| vgpuctl(&vgpud, line);
    let taken = |line: &str| refused(&vgpud, line, 5, "has the name web1 already");
    let first = ctl("define -p soft0 -t SOFT-256MQ --name web1")?;
    taken("define -p soft1 -t SOFT-256MQ --name web1")?;
    taken("start -p soft1 -t SOFT-256MQ --name web1")?;
    let other = ctl("start -p soft1 -t SOFT-256MQ --name tmp")?;
    taken("modify tmp --live --name web1")?;
    ctl("define tmp")?;
    taken("modify tmp --name web1")?;
    // A running vGPU keeps its name without its definition.
    ctl("start web1")?;
    ctl("undefine web1")?;
    taken("modify tmp --name web1")?;
    assert_eq!(vgpud.show("web1")?["uuid"], json!(first));
    ctl("stop web1")?;
    ctl("modify tmp --name web1")?;
    assert_eq!(vgpud.show("web1")?["uuid"], json!(other));
    let tree = vgpud.run_dir().join("tree");
    fs::create_dir_all(tree.join("soft0"))?;
    let text = r#"{"mdev_type":"SOFT-256MQ","attrs":[{"name":"web1"}]}"#;
    fs::write(tree.join("soft0/7f0c1e6a-2b1d-4a55-9d53-5c0f8e1a0004"), text)?;
    let import = run(&vgpud, &format!("import {}", tree.display()))?;
    assert!(
        import.stdout.contains(&format!("left out: vGPU {other} has its name web1")),
        "{import:?}"
    );
    for name in ["83c32df7", "a/b", "-x", ""] {
        let line = format!("define -t SOFT-256MQ --name={name}");
        refused(&vgpud, &line, 2, "--name")?;
    }
    refused(&vgpud, "define web9 -t SOFT-256MQ", 4, "write --name web9")
}

#[test]
fn a_name_survives_the_managers_death() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let transient = vgpuctl(&vgpud, "start -t SOFT-256MQ --name tmp")?;
    vgpuctl(&vgpud, "modify tmp --live --name tmp2")?;
    vgpuctl(&vgpud, "define -t SOFT-256MQ --name web1")?;
    vgpud.end(Signal::SIGKILL)?;
    vgpud.start_again()?;
    assert_eq!(vgpud.show("tmp2")?["uuid"], json!(transient));
    vgpuctl(&vgpud, "start web1")?;
    Ok(())
}

#[test]
fn a_name_in_two_files_is_reported() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let first = vgpuctl(&vgpud, "define -p soft0 -t SOFT-256MQ --name web1")?;
    let second = "7f0c1e6a-2b1d-4a55-9d53-5c0f8e1a0003";
    let folder = vgpud.config_dir().join("soft0");
    fs::copy(folder.join(&first), folder.join(second)).context("Cannot copy")?;
    refused(&vgpud, "start web1", 5, "Several vGPUs are named web1")?;
    vgpuctl(&vgpud, &format!("modify {second} --name web2"))?;
    vgpuctl(&vgpud, "start web1")?;
    Ok(())
}
