//! Callout scripts.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::Result;

use super::both::Both;
use super::{A, B};

/// Shell command that logs a call and its input.
const RECORD: &str = "{ echo \"$(basename \"$0\") $*\"; cat; echo; } >>\"$LOG\"";

#[test]
fn callout_scripts_run_as_under_mdevctl() -> Result<()> {
    let both = Both::new()?;
    both.script("notifiers/tell.sh", RECORD)?;
    let all = |both: &Both| -> Result<String> {
        both.works(&format!("define -u {A} -p soft0 -t SOFT-1Q"))?;
        both.works(&format!("modify -u {A} --addattr core --value 80"))?;
        both.works(&format!("modify -u {A} --delattr"))?;
        both.works(&format!("start -u {A}"))?;
        both.appear(A, "SOFT-1Q")?;
        fs::write(both.root.path().join("sys/bus/mdev/devices").join(A).join("remove"), "")?;
        both.works(&format!("stop -u {A}"))?;
        both.vanish(A)?;
        both.works(&format!("undefine -u {A}"))?;
        both.log()
    };
    assert_eq!(all(&both)?.matches("-e notify").count(), 6);

    // A script for other types, a script without get-capabilities, and a script after the
    // responsible one.
    both.script("callouts/10-other.sh", &format!("{RECORD}; exit 2"))?;
    both.script("callouts/20-mine.sh", &format!("{RECORD}; echo something >&2"))?;
    both.script("callouts/30-late.sh", RECORD)?;
    let log = all(&both)?;
    assert!(log.contains("20-mine.sh -t SOFT-1Q -e post -a start -s success -u"), "{log}");
    assert!(log.contains(
        "{\"mdev_type\":\"SOFT-1Q\",\"start\":\"manual\",\"attrs\":[{\"core\":\"80\"}]}"
    ));
    assert!(!log.contains("30-late.sh -t SOFT-1Q -e pre"), "{log}");

    // A script that declares its types: only this script is called.
    both.script(
        "callouts/25-version.sh",
        &format!(
            "{RECORD}; case \"$*\" in *capabilities*) echo '{{\"supports\":{{\"version\":2,\
             \"actions\":[\"start\",\"stop\",\"define\",\"undefine\",\"modify\"],\
             \"events\":[\"pre\",\"post\",\"live\"]}}}}';; esac"
        ),
    )?;
    let log = all(&both)?;
    assert!(log.contains("25-version.sh -t SOFT-1Q -e pre -a define -s none"), "{log}");
    assert!(!log.contains("20-mine.sh -t SOFT-1Q -e pre"), "{log}");
    assert!(log.contains("\"provides\""), "{log}");

    a_refusal_changes_nothing(&both)
}

/// A script that refuses: nothing changes and every script is notified. --force overrides it.
fn a_refusal_changes_nothing(both: &Both) -> Result<()> {
    both.works(&format!("define -u {B} -p soft0 -t SOFT-1Q"))?;
    both.log()?;
    both.script(
        "callouts/05-no.sh",
        &format!(
            "{RECORD}; case \"$*\" in *\"-e pre\"*) echo the cage is closed >&2; exit 5;; esac"
        ),
    )?;
    for folder in both.scripts() {
        fs::remove_file(folder.join("callouts/25-version.sh"))?;
    }
    for line in [
        format!("define -u {A} -p soft0 -t SOFT-1Q"),
        format!("start -u {B}"),
        format!("modify -u {B} --addattr core --value 1"),
        format!("undefine -u {B}"),
    ] {
        both.fails(&line)?;
        let log = both.log()?;
        assert!(
            log.contains("tell.sh -t SOFT-1Q -e notify -a") && log.contains("-s none"),
            "{log}"
        );
        assert!(!log.contains("-e post"), "{log}");
    }
    let refusal = both.ours(&["start", "-u", B])?;
    assert_eq!(refusal.status, 5);
    for words in
        ["05-no.sh refuses to start vGPU", "status 5: the cage is closed", "--force overrides it"]
    {
        assert!(refusal.stderr.contains(words), "{refusal:?}");
    }
    both.real(&["start", "-u", B])?;
    both.log()?;
    both.works(&format!("modify -u {B} --addattr core --value 1 --force"))?;
    both.works(&format!("undefine -u {B} -f"))?;
    both.log()?;
    Ok(())
}

#[test]
fn a_live_change_runs_its_callout_script() -> Result<()> {
    let both = Both::new()?;
    let ctl = |line: &str| both.ours(&line.split(' ').collect::<Vec<_>>());
    let answer = "case \"$*\" in *capabilities*) echo '{\"supports\":{\"version\":2,\"actions\":[\"modify\",\"start\"],\
                  \"events\":[\"live\",\"pre\",\"post\"]}}';; \
                  *\"-e live\"*) if grep -q 99; then echo too much >&2; exit 1; fi;; esac; echo \"$*\" >>\"$LOG\"";
    both.script("callouts/live.sh", answer)?;
    assert_eq!(ctl(&format!("start -u {A} -p soft0 -t SOFT-1Q"))?.status, 0);
    assert_eq!(ctl(&format!("modify -u {A} --live --attr core=50"))?.status, 0);
    let refused = ctl(&format!("modify -u {A} --live --attr core=99"))?;
    assert!(refused.status == 5 && refused.stderr.contains("too much"), "{refused:?}");
    assert_eq!(both.vgpud.show(A)?["live_attrs"][0]["core"], "50");
    let log = fs::read_to_string(both.scripts()[1].join("log"))?;
    assert!(log.contains(&format!("-e live -a modify -s none -u {A} -p soft0")), "{log}");
    // The script does not handle stops.
    let refused = ctl(&format!("stop -u {A}"))?;
    assert!(refused.stderr.contains("it does not support event pre of action stop"), "{refused:?}");
    assert_eq!(ctl(&format!("stop -u {A} --force"))?.status, 0);
    Ok(())
}

#[test]
fn a_script_that_others_can_write_blocks_the_command() -> Result<()> {
    let both = Both::new()?;
    both.script("callouts/ask.sh", "echo \"$*\" >>\"$LOG\"")?;
    let path = both.scripts()[1].join("callouts/ask.sh");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o775))?;
    let refused = both.ours(&["start", "-u", A, "-p", "soft0", "-t", "SOFT-1Q"])?;
    assert!(refused.status == 5 && refused.stderr.contains("others can write to"), "{refused:?}");
    assert!(!both.scripts()[1].join("log").exists());
    assert!(
        both.vgpud.refused("GET", &format!("/v1/vgpus/{A}"), None)?.2.contains("There is no vGPU")
    );
    Ok(())
}
