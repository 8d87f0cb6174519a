//! The command line: sound, mdevctl's where it has one, and readable by programs.

use clap::CommandFactory;

use super::*;

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

/// Commands that have no answer for a program to read, and why.
const WITHOUT_JSON: [(&str, &str); 6] = [
    ("completions", "what it prints is a shell's"),
    ("man", "what it writes is troff"),
    ("top", "is a terminal's; stats has the same numbers"),
    ("start-parent-mdevs", "is udev's, and refuses"),
    ("libvirt hook", "is libvirt's, which reads its exit status and one line"),
    ("help", "is for people"),
];

#[test]
fn every_command_answers_programs() {
    let mut without = Vec::new();
    let mut command = Cli::command();
    command.build();
    lacking(&command, "", &mut without);
    without.sort_unstable();
    without.dedup();
    let mut exempt: Vec<_> = WITHOUT_JSON.iter().map(|(name, _)| (*name).to_owned()).collect();
    exempt.sort_unstable();
    assert_eq!(without, exempt, "give it --output json, or a reason above");
}

/// Names of the commands below one that have no `--output json`.
fn lacking(command: &clap::Command, path: &str, found: &mut Vec<String>) {
    for below in command.get_subcommands() {
        let name = format!("{path} {}", below.get_name()).trim_start().to_owned();
        if below.get_name() == "help" {
            found.push("help".to_owned());
            continue;
        }
        lacking(below, &name, found);
        let json = |arg: &clap::Arg| {
            let values = arg.get_possible_values();
            arg.get_long() == Some("output") && values.iter().any(|v| v.matches("json", false))
        };
        // One that only leads to others answers nothing itself.
        let leads = below.is_subcommand_required_set();
        if !leads && !below.get_arguments().any(json) {
            found.push(name);
        }
    }
}

#[test]
fn mdevctl_command_lines_are_understood() {
    let uuid = "83c32df7-d52e-4ec1-9668-1f3c7e4df107";
    for line in [
        "types",
        "types -p soft0 --dumpjson",
        "list -d -v -u UUID -p soft0",
        "list --defined --dumpjson",
        "define -u UUID -p soft0 -t SOFT-1Q -a --force",
        "define -p soft0 --jsonfile f",
        "define --uuid UUID",
        "undefine -u UUID -p soft0 -f",
        "modify -u UUID -p soft0 --addattr core --value 80 -i 0",
        "modify -u UUID --delattr --index 0",
        "modify -u UUID -m",
        "modify -u UUID -a -t SOFT-2Q",
        "modify -u UUID -l -d --jsonfile f -f",
        "start-parent-mdevs soft0",
        "start -u UUID",
        "start -p soft0 -t SOFT-1Q",
        "start -p soft0 --jsonfile f -f",
        "stop -u UUID -f",
    ] {
        let words = line.replace("UUID", uuid);
        let parsed = Cli::try_parse_from(["vgpuctl"].into_iter().chain(words.split(' ')));
        assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    for line in [
        "define",
        "start",
        "stop",
        "modify -u 83c32df7-d52e-4ec1-9668-1f3c7e4df107",
        "start -u 1",
        "define -t a --jsonfile f",
        "start -t a --attr core",
        "list --output xml",
    ] {
        assert!(Cli::try_parse_from(["vgpuctl"].into_iter().chain(line.split(' '))).is_err());
    }
}
