//! Compatibility with mdevctl: the real mdevctl and `vgpuctl` change definitions alike, print the
//! same bytes, and run callout scripts alike. docs/mdevctl.md lists the deliberate differences.

mod both;
mod callouts;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use system_tests::vgpuctl::path as vgpuctl_path;
use system_tests::{Vgpud, wait_for};
use vgpud_host::test_util::write_executable;

use self::both::{Both, done, real};

const A: &str = "0c9d8f4e-52c5-4f0a-9a3a-6d6a0a7b000a";
const B: &str = "0c9d8f4e-52c5-4f0a-9a3a-6d6a0a7b000b";
const C: &str = "0c9d8f4e-52c5-4f0a-9a3a-6d6a0a7b000c";
const NONE: &str = "0c9d8f4e-52c5-4f0a-9a3a-6d6a0a7b0000";

#[test]
fn every_verb_and_flag_of_mdevctl_exists() -> Result<()> {
    let flags = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| c.is_whitespace() || c == ',' || c == '.' || c == '\'');
        words.filter(|word| word.starts_with('-') && word.len() > 1).map(str::to_owned).collect()
    };
    let both = Both::new()?;
    let help = both.real(&["help"])?.stdout;
    let verbs: Vec<_> = help
        .lines()
        .skip_while(|line| !line.starts_with("Commands:"))
        .skip(1)
        .map_while(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .collect();
    assert!(verbs.contains(&"define") && verbs.len() >= 7, "{help}");
    for verb in verbs.iter().filter(|verb| **verb != "help") {
        let (theirs, ours) = (both.real(&[verb, "--help"])?, both.ours(&[verb, "--help"])?);
        assert_eq!(ours.status, 0, "{verb}");
        let (theirs, ours) = (flags(&theirs.stdout), flags(&ours.stdout));
        // --version belongs to the program, not to a command.
        let missing: Vec<_> = theirs
            .difference(&ours)
            .filter(|f| !["-V", "--version"].contains(&f.as_str()))
            .collect();
        assert!(missing.is_empty(), "{verb} has no {missing:?}");
    }
    Ok(())
}

/// Lists with all combinations of options, which must print the same.
fn lists(both: &Both) -> Result<()> {
    for uuid in ["", &format!(" -u {A}"), &format!(" -u {C}"), &format!(" --uuid {NONE}")] {
        for parent in ["", " -p soft0", " --parent soft9"] {
            for how in
                ["-d", "-d -v", "--defined --verbose", "-d --dumpjson", "", "-v", "--dumpjson"]
            {
                let line = format!("list {how}{uuid}{parent}");
                both.works(line.replace("list  ", "list ").trim_end())?;
            }
        }
    }
    Ok(())
}

#[test]
fn definitions_match_mdevctl_byte_for_byte() -> Result<()> {
    let both = Both::new()?;
    let file = both.root.path().join("vgpu.json");
    let text =
        r#"{"mdev_type":"SOFT-2C","start":"auto","attrs":[{"priority":"low"},{"core":"7"}]}"#;
    fs::write(&file, text)?;
    let file = file.display();

    for line in ["types", "types --dumpjson", "types -p soft0", "types -p soft9 --dumpjson"] {
        assert!(!both.works(line)?.is_empty());
    }
    for line in ["list", "list -d", "list --dumpjson", "list -d --dumpjson", "list -v -p soft0"] {
        both.works(line)?;
    }
    both.works(&format!("define -u {A} -p soft0 -t SOFT-1Q"))?;
    both.works(&format!("define --uuid {B} --parent soft0 --type SOFT-256MC --auto"))?;
    both.works(&format!("define -u {C} -p soft0 --jsonfile {file} --force"))?;
    both.fails(&format!("define -u {A} -p soft0 -t SOFT-1Q"))?;
    both.fails(&format!("define -u {A} -p soft0 --jsonfile {file}"))?;
    both.fails("define")?;
    both.fails(&format!("define -u {NONE}"))?;
    both.fails("define -p soft0")?;
    both.fails(&format!("define -p soft0 -t SOFT-1Q --jsonfile {file}"))?;
    both.fails("define -p soft0 --jsonfile /nonexistent")?;
    lists(&both)?;

    for line in [
        "--addattr core --value 80",
        "--addattr mode --value soft --index 0",
        "--addattr priority --value high -i 2",
        "--delattr --index 1",
        "--addattr refresh --value 30",
        "--delattr",
        "--auto",
        "-a",
        "-m",
        "-t SOFT-2Q --manual",
        "-p soft0 --addattr timeslice --value 0.5 -f",
        "-d --addattr submissions --value 1000",
    ] {
        both.works(&format!("modify -u {A} {line}"))?;
        both.works(&format!("list -d -v -u {A}"))?;
    }
    for line in [
        "--addattr core --value 1 --index 9",
        "--delattr -i 9",
        "--addattr core",
        "--value 3",
        "--delattr --value 3",
        "--auto --manual",
        "-p soft9 --auto",
        "",
        "-p soft0 --jsonfile /nonexistent",
    ] {
        both.fails(format!("modify -u {A} {line}").trim_end())?;
    }
    both.fails(&format!("modify -u {NONE} --auto"))?;
    for _ in 0..6 {
        // An index beyond the attributes.
        both.works(&format!("modify -u {A} --delattr"))?;
    }
    both.works(&format!("modify -u {A} -p soft0 --jsonfile {file}"))?;
    lists(&both)?;

    both.fails(&format!("undefine -u {A} -p soft9"))?;
    both.works(&format!("undefine -u {A} -p soft0"))?;
    both.works(&format!("undefine --uuid {B} --force"))?;
    both.fails(&format!("undefine -u {NONE}"))?;
    both.fails("undefine")?;
    lists(&both)
}

#[test]
fn running_vgpus_are_listed_as_by_mdevctl() -> Result<()> {
    let both = Both::new()?;
    // The daemon reports attributes of running devices, which mdevctl gets from a driver's callout.
    let attributes = both.root.path().join("usr/lib/mdevctl/scripts.d/callouts/driver.sh");
    write_executable(
        &attributes,
        "#!/bin/sh\ncase \"$*\" in *\"-e get -a attributes\"*)\n\
         case \"$*\" in *000a*) echo '[{\"core\":\"40\"},{\"priority\":\"high\"}]';; *) echo '[]';; esac;; esac\n",
    )?;

    both.works(&format!("define -u {A} -p soft0 -t SOFT-1Q -a"))?;
    both.works(&format!("modify -u {A} --addattr core --value 40"))?;
    both.works(&format!("modify -u {A} --addattr priority --value high"))?;
    // Attributes that mdevctl writes to the kernel's device are in force here.
    let written = both.start_with(A, "SOFT-1Q", &["core", "priority"])?;
    assert_eq!(written, ["40", "high"]);
    let started = both.ours(&["start", "-u", A])?;
    assert_eq!((started.status, started.stdout.as_str()), (0, ""));
    let in_force = serde_json::json!([{ "core": written[0] }, { "priority": written[1] }]);
    assert_eq!(both.vgpud.show(A)?["live_attrs"], in_force);
    both.works(&format!("start -u {B} -p soft0 -t SOFT-256MC"))?;
    both.appear(B, "SOFT-256MC")?;
    for line in ["list", "list -d", "list --dumpjson", "list -d --dumpjson", "list -d -p soft0"] {
        assert!(both.works(line)?.contains(A), "{line}");
    }
    for uuid in [A, B, NONE] {
        for how in ["", " --dumpjson", " -d", " -d --dumpjson"] {
            both.works(&format!("list -u {uuid}{how}"))?;
        }
    }
    // -v adds lines after mdevctl's.
    let (theirs, ours) =
        (both.real(&["list", "-v", "-u", A])?, both.ours(&["list", "-v", "-u", A])?);
    assert!(ours.stdout.starts_with(&theirs.stdout), "{theirs:?} {ours:?}");
    assert!(ours.stdout[theirs.stdout.len()..].starts_with("  Socket: "), "{ours:?}");

    both.fails(&format!("start -u {A}"))?;
    both.fails(&format!("start -u {NONE}"))?;
    both.fails(&format!("start -u {A} -t SOFT-2Q"))?;
    both.fails("start")?;
    // Changes apply to the definition, not to the running vGPU.
    both.works(&format!("modify -u {A} --delattr"))?;
    both.works(&format!("list --dumpjson -u {A}"))?;
    both.works(&format!("list -d --dumpjson -u {A}"))?;
    // A transient vGPU is defined with its running attributes.
    both.works(&format!("define -u {B}"))?;
    both.works(&format!("list -d --dumpjson -u {B}"))?;
    both.works(&format!("undefine -u {A}"))?;
    for uuid in [A, B] {
        both.works(&format!("stop -u {uuid}"))?;
        both.vanish(uuid)?;
        both.works("list")?;
    }
    both.fails(&format!("stop -u {A}"))?;

    for verb in ["define", "start"] {
        let line = [verb, "-p", "soft0", "-t", "SOFT-256MC"];
        for done in [both.real(&line)?, both.ours(&line)?] {
            let uuid = done.stdout.strip_suffix('\n').context("A line")?;
            assert_eq!((done.status, uuid.len(), uuid.to_lowercase().as_str()), (0, 36, uuid));
        }
    }
    Ok(())
}

#[test]
fn a_live_change_affects_only_the_running_vgpu() -> Result<()> {
    let both = Both::new()?;
    let ctl = |line: &str| -> Result<String> {
        let done = both.ours(&line.split(' ').collect::<Vec<_>>())?;
        ensure!(done.status == 0, "{line}: {done:?}");
        Ok(done.stdout)
    };
    ctl(&format!("define -u {A} -p soft0 -t SOFT-1Q --attr core=40"))?;
    ctl(&format!("start -u {A}"))?;
    ctl(&format!("modify -u {A} --live --attr priority=high"))?;
    ctl(&format!("modify -u {A} --attr refresh=30"))?;
    // Each list gets a change, and neither list replaces the other.
    ctl(&format!("modify -u {A} --live --defined --attr core=50"))?;
    let vgpu = both.vgpud.show(A)?;
    assert_eq!(vgpu["live_attrs"].to_string(), r#"[{"core":"50"},{"priority":"high"}]"#);
    assert_eq!(vgpu["attrs"].to_string(), r#"[{"core":"50"},{"refresh":"30"}]"#);
    // A file replaces the whole list.
    let file = both.root.path().join("a.json");
    fs::write(&file, r#"{"mdev_type":"SOFT-1Q","start":"auto","attrs":[{"core":"60"}]}"#)?;
    ctl(&format!("modify -u {A} --live --defined --jsonfile {}", file.display()))?;
    let vgpu = both.vgpud.show(A)?;
    assert_eq!(vgpu["live_attrs"].to_string(), r#"[{"core":"60"}]"#);
    assert_eq!((&vgpu["attrs"], vgpu["start"].as_str()), (&vgpu["live_attrs"], Some("auto")));
    // A start overrides the definition once.
    ctl(&format!("stop -u {A}"))?;
    fs::write(&file, r#"{"mdev_type":"SOFT-2Q","start":"auto","attrs":[{"core":"7"}]}"#)?;
    ctl(&format!("start -u {A} -p soft0 --jsonfile {}", file.display()))?;
    assert_eq!(ctl("list")?, format!("{A} soft0 SOFT-2Q auto (defined)\n"));
    assert_eq!(ctl("list -d")?, format!("{A} soft0 SOFT-1Q auto (active)\n"));
    assert_eq!(both.vgpud.show(A)?["live_attrs"].to_string(), r#"[{"core":"7"}]"#);
    Ok(())
}

#[test]
fn lsvgpu_lists_vgpus() -> Result<()> {
    let both = Both::new()?;
    both.works(&format!("define -u {A} -p soft0 -t SOFT-1Q"))?;
    let (lsmdev, lsvgpu) = (both.root.path().join("lsmdev"), both.root.path().join("lsvgpu"));
    symlink(real()?, &lsmdev)?;
    symlink(vgpuctl_path()?, &lsvgpu)?;
    for words in [&["-d"][..], &["--defined", "--dumpjson", "-u", A], &[]] {
        let mut theirs = Command::new(&lsmdev);
        let theirs = done(theirs.args(words).env("MDEVCTL_ENV_ROOT", both.root.path()))?;
        let mut ours = Command::new(&lsvgpu);
        let ours = done(ours.args(words).arg("--socket").arg(both.vgpud.api_socket()))?;
        assert_eq!((theirs.status, theirs.stdout), (ours.status, ours.stdout), "{words:?}");
    }
    Ok(())
}

#[test]
fn autostart_vgpus_start_in_order() -> Result<()> {
    let mut vgpud = Vgpud::start_with(&[
        "--parent",
        "soft:b",
        "--parent",
        "soft:a",
        "--scripts-dir",
        "/nonexistent",
    ])?;
    for (uuid, parent) in [(C, "a"), (A, "b"), (B, "a")] {
        let request = serde_json::json!({
            "uuid": uuid, "parent": parent, "mdev_type": "SOFT-256MC", "start": "auto", "define": true,
        });
        vgpud.create(&request)?;
    }
    let notifiers = vgpud.config_dir().join("scripts.d/notifiers");
    fs::create_dir_all(&notifiers)?;
    let (script, log) = (notifiers.join("tell.sh"), vgpud.config_dir().join("log"));
    let text = format!("#!/bin/sh\necho \"$4 $6 $8 ${{10}}\" >>'{}'\n", log.display());
    write_executable(&script, &text)?;
    for path in [&notifiers, notifiers.parent().context("scripts.d")?] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    vgpud.end(nix::sys::signal::Signal::SIGTERM)?;
    vgpud.start_again()?;
    let lines = || fs::read_to_string(&log).unwrap_or_default();
    wait_for("all vGPUs have started", || lines().lines().count() == 3)?;
    let expected: String = [B, C, A].map(|uuid| format!("notify start success {uuid}\n")).concat();
    assert_eq!(lines(), expected, "sorted by parent, then by vGPU");
    Ok(())
}

#[test]
fn a_configuration_tree_of_mdevctl_is_imported() -> Result<()> {
    let both = Both::new()?;
    let tree = both.root.path().join("etc/mdevctl.d");
    let old = |uuid: &str, text: &str| -> Result<()> {
        fs::create_dir_all(tree.join("0000:3b:00.0"))?;
        Ok(fs::write(tree.join("0000:3b:00.0").join(uuid), text)?)
    };
    for (uuid, line) in [(A, "-a"), (B, "")] {
        let line = format!("define -u {uuid} -p 0000:3b:00.0 -t nvidia-63 {line}");
        let done = both.real(&line.split_whitespace().collect::<Vec<_>>())?;
        ensure!(done.status == 0, "{done:?}");
    }
    let line = format!("modify -u {B} --addattr assign_adapter --value 5");
    both.real(&line.split(' ').collect::<Vec<_>>())?;
    old("README", "not one")?;
    old(C, "{ \"start\": \"auto\" }")?;
    fs::create_dir_all(tree.join("scripts.d/callouts"))?;
    let import = |flags: &str| {
        let tree = tree.display().to_string();
        let words = ["import", &tree].into_iter().chain(flags.split_whitespace());
        both.ours(&words.collect::<Vec<_>>())
    };

    let plain = import("")?;
    assert_eq!(plain.status, 1, "{plain:?}");
    let remedy = "there is no parent 0000:3b:00.0; add --parent 0000:3b:00.0=NEW (soft0)";
    assert!(plain.stdout.contains(remedy));
    assert!(plain.stderr.contains("4 of 4 definitions are left out"), "{plain:?}");
    assert!(plain.stderr.contains("callout scripts are not imported"), "{plain:?}");
    let parent = import("--parent 0000:3b:00.0=soft0")?;
    assert!(
        parent
            .stdout
            .contains("parent soft0 has no type nvidia-63; add --type nvidia-63=NEW (SOFT-256MQ"),
        "{parent:?}"
    );
    let mapped = "--parent 0000:3b:00.0=soft0 --type nvidia-63=SOFT-1Q";
    let dry = import(mapped)?;
    assert!(dry.stdout.contains(&format!("{A} soft0 SOFT-1Q auto: would be defined\n")), "{dry:?}");
    assert!(dry.stdout.contains("There is no attribute \"assign_adapter\""), "{dry:?}");
    assert!(
        dry.stdout.contains("README 0000:3b:00.0: left out: its name is not a uuid")
            || dry.stdout.contains("its name is not a uuid")
    );
    assert!(dry.stdout.contains("missing field `mdev_type`"), "{dry:?}");
    assert_eq!(both.vgpud.get("/v1/vgpus")?, serde_json::json!([]), "a dry run changes nothing");

    let some = import(&format!("{mapped} --drop-attrs --apply"))?;
    assert!(
        some.stdout
            .contains(&format!("{B} soft0 SOFT-1Q manual: defined, without assign_adapter\n")),
        "{some:?}"
    );
    assert!(some.stderr.contains("2 of 4 definitions are left out"), "{some:?}");
    let listed = both.ours(&["list", "-d"])?.stdout;
    assert_eq!(listed, format!("{A} soft0 SOFT-1Q auto\n{B} soft0 SOFT-1Q manual\n"));

    // Existing definitions take precedence over imported ones.
    both.ours(&["modify", "-u", A, "--attr", "core=10"])?;
    let again = import(&format!("{mapped} --drop-attrs --apply --output json"))?;
    let again: Value = serde_json::from_str(&again.stdout)?;
    let of = |uuid: &str| again.as_array().and_then(|all| all.iter().find(|e| e["uuid"] == uuid));
    assert_eq!(of(B).context("The vGPU is not listed")?["result"], "there_already");
    let changed = of(A).context("The vGPU is not listed")?;
    assert_eq!(changed["result"], "left_out");
    assert!(
        changed["reason"]
            .as_str()
            .is_some_and(|why| why.contains("has this uuid and is not changed"))
    );
    assert_eq!(both.vgpud.show(A)?["attrs"].to_string(), r#"[{"core":"10"}]"#);
    Ok(())
}

#[test]
fn a_tree_without_definitions_is_told() -> Result<()> {
    let both = Both::new()?;
    let empty = tempfile::tempdir()?;
    let none = both.ours(&["import", &empty.path().to_string_lossy()])?;
    assert!(none.stdout.starts_with("There are no definitions in /"), "{none:?}");
    assert_eq!(none.status, 0);
    let none = both.ours(&["import", "/nonexistent/mdevctl.d"])?;
    let missing = "There is no directory /nonexistent/mdevctl.d";
    assert!(none.status == 4 && none.stderr.contains(missing), "{none:?}");
    Ok(())
}

#[test]
fn unsupported_features_name_an_alternative() -> Result<()> {
    let both = Both::new()?;
    let done = both.ours(&["start-parent-mdevs", "soft0"])?;
    if done.status != 2 {
        bail!("{done:?}");
    }
    assert!(
        done.stderr.contains("vgpud itself starts vGPUs that are defined with --auto"),
        "{done:?}"
    );
    Ok(())
}
