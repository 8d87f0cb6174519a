//! Tests of the command line: consistency, mdevctl's command lines, JSON output of every command.

use clap::CommandFactory;

use super::*;

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

/// Commands without JSON output, and the reason.
const WITHOUT_JSON: [(&str, &str); 8] = [
    ("completions", "prints a shell script"),
    ("man", "writes troff"),
    ("top", "draws on a terminal; stats has the same numbers"),
    ("start-parent-mdevs", "is called by udev and always fails"),
    ("libvirt hook", "is called by libvirt, which reads the exit status and one line"),
    ("run", "prints what its program prints"),
    ("run-vm", "prints what its VM prints"),
    ("help", "is for people"),
];

#[test]
fn every_command_has_json_output() {
    let mut without = Vec::new();
    let mut command = Cli::command();
    command.build();
    without_json(&command, "", &mut without);
    without.sort_unstable();
    without.dedup();
    let mut exempt: Vec<_> = WITHOUT_JSON.iter().map(|(name, _)| (*name).to_owned()).collect();
    exempt.sort_unstable();
    assert_eq!(without, exempt, "add --output json, or a reason above");
}

/// Collects the names of a command's subcommands without `--output json`.
fn without_json(command: &clap::Command, path: &str, found: &mut Vec<String>) {
    for subcommand in command.get_subcommands() {
        let name = format!("{path} {}", subcommand.get_name()).trim_start().to_owned();
        if subcommand.get_name() == "help" {
            found.push("help".to_owned());
            continue;
        }
        without_json(subcommand, &name, found);
        let json = |arg: &clap::Arg| {
            let values = arg.get_possible_values();
            arg.get_long() == Some("output") && values.iter().any(|v| v.matches("json", false))
        };
        // A command that requires a subcommand has no output of its own.
        let requires_subcommand = subcommand.is_subcommand_required_set();
        if !requires_subcommand && !subcommand.get_arguments().any(json) {
            found.push(name);
        }
    }
}

#[test]
fn mdevctl_command_lines_are_accepted() {
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
fn invalid_command_lines_are_refused() {
    for line in [
        "define",
        "start",
        "stop",
        "modify -u 83c32df7-d52e-4ec1-9668-1f3c7e4df107",
        "start -u a/b",
        "start -u 83c32df7",
        "define -t a --jsonfile f",
        "start -t a --attr core",
        "list --output xml",
    ] {
        assert!(Cli::try_parse_from(["vgpuctl"].into_iter().chain(line.split(' '))).is_err());
    }
}
