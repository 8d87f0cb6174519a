//! Parser of command lines with errors of one line: the problem and its remedy.
//!
//! clap's own errors have several lines with a usage block. Output of `--help` and `--version` is
//! clap's.

use std::error::Error as _;
use std::ffi::OsString;
use std::num::ParseIntError;
use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// Exit status for an invalid command line.
pub const STATUS: u8 = 2;

/// Parses a command line. Help and version are printed, and end the program.
pub fn parse<T: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<T, String> {
    T::try_parse_from(args).map_err(|error| {
        if is_help(&error) {
            error.exit();
        }
        one_line(&error)
    })
}

/// Prints an error of a program's command line, and returns the exit status.
pub fn refuse(program: &str, message: &str) -> ExitCode {
    eprintln!("{program}: {message}");
    STATUS.into()
}

fn is_help(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    )
}

/// Returns an error as one line: the problem, and the command that prints help.
pub fn one_line(error: &Error) -> String {
    let problem = problem(error).unwrap_or_else(|| clap_message(error));
    match command(error) {
        Some(command) => format!("{problem}; see `{command} --help`"),
        None => problem,
    }
}

fn problem(error: &Error) -> Option<String> {
    let string = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let strings = |kind| match error.get(kind) {
        Some(ContextValue::Strings(texts)) => texts.as_slice(),
        Some(ContextValue::String(text)) => std::slice::from_ref(text),
        _ => &[],
    };
    let arg = string(ContextKind::InvalidArg);
    Some(match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let name = string(ContextKind::InvalidSubcommand)?;
            format!(
                "There is no command {name:?}{}",
                did_you_mean(strings(ContextKind::SuggestedSubcommand))
            )
        }
        ErrorKind::MissingSubcommand => "Give a command".to_owned(),
        ErrorKind::UnknownArgument => match arg? {
            option if option.starts_with('-') => {
                let near =
                    strings(ContextKind::SuggestedArg).iter().filter(|name| is_near(option, name));
                format!(
                    "There is no option {option} here{}",
                    did_you_mean(&near.collect::<Vec<_>>())
                )
            }
            argument => format!("{argument:?} is an unexpected argument"),
        },
        ErrorKind::MissingRequiredArgument => {
            let missing: Vec<_> =
                strings(ContextKind::InvalidArg).iter().map(|arg| alternatives(arg)).collect();
            if missing.is_empty() {
                return None;
            }
            format!("Give {}", missing.join(" and "))
        }
        ErrorKind::ArgumentConflict => {
            let arg = arg.or_else(|| string(ContextKind::InvalidSubcommand))?;
            match strings(ContextKind::PriorArg) {
                [other] if other == arg => format!("{arg} is given twice; give it once"),
                [] => format!("{arg} cannot be combined with the other arguments"),
                others => format!("{arg} cannot be combined with {}", any_of(others)),
            }
        }
        ErrorKind::NoEquals => {
            let arg = arg?;
            format!("{arg} needs an equals sign before its value")
        }
        ErrorKind::InvalidValue => match (arg?, string(ContextKind::InvalidValue)?) {
            (arg, "") => format!("{arg} needs a value"),
            (arg, value) => {
                let names = strings(ContextKind::ValidValue);
                format!("{value:?} is not a value of {arg}: give {}", any_of(names))
            }
        },
        ErrorKind::ValueValidation => {
            let (arg, value) = (arg?, string(ContextKind::InvalidValue)?);
            format!("{value:?} is not a value of {arg}: {}", reason(error, value)?)
        }
        _ => return None,
    })
}

fn did_you_mean(names: &[impl AsRef<str>]) -> String {
    match names {
        [] => String::new(),
        names => format!("; did you mean {}?", any_of(names)),
    }
}

/// Returns whether an option is likely to be a mistyped or abbreviated `name`. clap also suggests
/// options that merely have some letters in common.
fn is_near(option: &str, name: &str) -> bool {
    let [option, name] = [option, name].map(|text| text.trim_start_matches('-'));
    let option = option.split('=').next().unwrap_or(option);
    let shorter = option.len().min(name.len());
    let typing_errors = (shorter / 3).max(1);
    name.starts_with(option) || strsim::damerau_levenshtein(option, name) <= typing_errors
}

/// Returns the reason that a value's parser gave.
fn reason(error: &Error, value: &str) -> Option<String> {
    let source = error.source()?;
    if source.is::<ParseIntError>() {
        return Some("give a whole number".to_owned());
    }
    let text = source.to_string();
    // clap's message for numbers out of range.
    let range = text.strip_prefix(value).and_then(|text| text.strip_prefix(" is not in "));
    Some(match range.and_then(|range| range.split_once("..=")) {
        Some((min, max)) => format!("give {min} to {max}"),
        None => text,
    })
}

/// Joins names: `a`, `a or b`, `a, b or c`.
fn any_of(names: &[impl AsRef<str>]) -> String {
    let names: Vec<_> = names.iter().map(AsRef::as_ref).collect();
    match names.as_slice() {
        [] => "another".to_owned(),
        [name] => (*name).to_owned(),
        [others @ .., last] => format!("{} or {last}", others.join(", ")),
    }
}

/// Formats a missing argument, or the alternatives of a group: `<--uuid <UUID>|--type <TYPE>>`.
fn alternatives(arg: &str) -> String {
    let group = arg.strip_prefix('<').and_then(|arg| arg.strip_suffix('>'));
    match group.filter(|group| group.contains('|')) {
        Some(group) => any_of(&group.split('|').collect::<Vec<_>>()),
        None => arg.to_owned(),
    }
}

/// Returns the command of a usage line: the part before its first argument.
fn command(error: &Error) -> Option<String> {
    let ContextValue::StyledStr(usage) = error.get(ContextKind::Usage)? else { return None };
    let usage = usage.to_string();
    let words = usage.strip_prefix("Usage:")?.lines().next()?.split_whitespace();
    let name: Vec<_> = words.take_while(|word| !word.starts_with(['-', '[', '<'])).collect();
    Some(name.join(" "))
}

/// Returns clap's own message, without prefix and usage.
fn clap_message(error: &Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text.find("\n\n").unwrap_or(text.len());
    text[..end].split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use clap::ArgGroup;
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "ctl")]
    enum Cli {
        /// Starts a vGPU.
        #[command(group = ArgGroup::new("what").required(true).multiple(true)
            .args(["uuid", "kind"]))]
        Start {
            #[arg(long)]
            uuid: Option<mdev_core::ids::VgpuId>,
            #[arg(long, conflicts_with = "uuid")]
            kind: Option<String>,
            #[arg(long, value_parser = clap::value_parser!(u8).range(1..=100))]
            core: Option<u8>,
            #[arg(long, value_parser = ["text", "json"])]
            output: Option<String>,
            #[arg(long, num_args = 0..=1, require_equals = true)]
            tcp: Option<u16>,
        },
        /// Stops a vGPU.
        Stop {
            #[arg(long)]
            force: bool,
            #[arg(long)]
            verbose: bool,
        },
        /// Has two required arguments.
        Copy { from: String, to: String },
    }

    fn message(line: &str) -> String {
        let words = std::iter::once("ctl").chain(line.split_whitespace());
        one_line(&Cli::try_parse_from(words).unwrap_err())
    }

    #[test]
    fn each_error_has_problem_and_remedy() {
        for (line, expected) in [
            ("strat", "There is no command \"strat\"; did you mean start?; see `ctl --help`"),
            ("start", "Give --uuid <UUID> or --kind <KIND>; see `ctl start --help`"),
            ("copy", "Give <FROM> and <TO>; see `ctl copy --help`"),
            ("copy a b c", "\"c\" is an unexpected argument; see `ctl copy --help`"),
            ("start --kind a --cor 5", "There is no option --cor here; did you mean --core?"),
            ("stop --core 5", "There is no option --core here; see `ctl stop --help`"),
            ("stop --froce", "There is no option --froce here; did you mean --force?"),
            ("stop --verb", "There is no option --verb here; did you mean --verbose?"),
            (
                "start --uuid soft0",
                "\"soft0\" is not a value of --uuid <UUID>: a uuid is 32 hexadecimal digits, as in \
                 83c32df7-d52e-4ec1-9668-1f3c7e4df107",
            ),
            ("start --kind a --core 101", "\"101\" is not a value of --core <CORE>: give 1 to 100"),
            (
                "start --kind a --core x",
                "\"x\" is not a value of --core <CORE>: give a whole number",
            ),
            (
                "start --kind a --output xml",
                "\"xml\" is not a value of --output <OUTPUT>: give text or json",
            ),
            ("start --kind", "--kind <KIND> needs a value"),
            ("start --kind a --kind b", "--kind <KIND> is given twice"),
            (
                "start --kind a --uuid 83c32df7-d52e-4ec1-9668-1f3c7e4df107",
                "--kind <KIND> cannot be combined with --uuid <UUID>",
            ),
        ] {
            let message = message(line);
            assert!(message.contains(expected), "{line}: {message}");
        }
    }

    proptest! {
        #[test]
        fn every_error_is_one_line(words in prop::collection::vec(
            prop_oneof![
                "start|copy|--uuid|--kind|--core|--output|--tcp|--tcp=|--core=|-x|--|-u",
                "[ -~]{0,8}",
                "\\PC{0,6}",
                "[a\n\t]{0,4}",
            ], 0..6)) {
            let words = std::iter::once("ctl".to_owned()).chain(words);
            if let Err(error) = Cli::try_parse_from(words) && !is_help(&error) {
                let message = one_line(&error);
                prop_assert!(
                    !message.is_empty() && message.lines().count() == 1,
                    "{message:?}"
                );
            }
        }
    }
}
