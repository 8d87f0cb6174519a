//! Command lines that make no sense, said in one line: what is wrong, and what to do.
//!
//! clap says the same in several, with a usage block; `--help` and `--version` stay its own.

use std::error::Error as _;
use std::ffi::OsString;
use std::num::ParseIntError;
use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// Exit status for a command line that makes no sense.
pub const STATUS: u8 = 2;

/// Reads a command line. What is no mistake (help, a version) is printed, and ends the program.
pub fn parse<T: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<T, String> {
    T::try_parse_from(args).map_err(|error| {
        if is_help(&error) {
            error.exit();
        }
        one_line(&error)
    })
}

/// Says what is wrong with a program's command line, and how it ends.
pub fn refuse(program: &str, what: &str) -> ExitCode {
    eprintln!("{program}: {what}");
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

/// What is wrong, and where it says how it is to be.
pub fn one_line(error: &Error) -> String {
    let what = what(error).unwrap_or_else(|| clap_words(error));
    match command(error) {
        Some(command) => format!("{what}; see `{command} --help`"),
        None => what,
    }
}

fn what(error: &Error) -> Option<String> {
    let one = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let many = |kind| match error.get(kind) {
        Some(ContextValue::Strings(texts)) => texts.as_slice(),
        Some(ContextValue::String(text)) => std::slice::from_ref(text),
        _ => &[],
    };
    let meant = |kind| match many(kind) {
        [] => String::new(),
        names => format!("; did you mean {}?", any_of(names)),
    };
    let arg = one(ContextKind::InvalidArg);
    Some(match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let name = one(ContextKind::InvalidSubcommand)?;
            format!("There is no command {name:?}{}", meant(ContextKind::SuggestedSubcommand))
        }
        ErrorKind::MissingSubcommand => "Say what is to be done: give a command".to_owned(),
        ErrorKind::UnknownArgument => match arg? {
            option if option.starts_with('-') => {
                format!("There is no option {option} here{}", meant(ContextKind::SuggestedArg))
            }
            word => format!("{word:?} is one word too many"),
        },
        ErrorKind::MissingRequiredArgument => {
            let missing: Vec<_> =
                many(ContextKind::InvalidArg).iter().map(|arg| ways(arg)).collect();
            if missing.is_empty() {
                return None;
            }
            format!("Give {}", missing.join(" and "))
        }
        ErrorKind::ArgumentConflict => {
            let arg = arg.or_else(|| one(ContextKind::InvalidSubcommand))?;
            match many(ContextKind::PriorArg) {
                [other] if other == arg => format!("{arg} is given twice: once is enough"),
                [] => format!("{arg} goes with none of the others"),
                others => format!("{arg} does not go with {}", any_of(others)),
            }
        }
        ErrorKind::NoEquals => {
            let arg = arg?;
            format!("{arg} takes its value after an equals sign")
        }
        ErrorKind::InvalidValue => match (arg?, one(ContextKind::InvalidValue)?) {
            (arg, "") => format!("{arg} needs a value"),
            (arg, value) => {
                let names = many(ContextKind::ValidValue);
                format!("{value:?} is no value of {arg}: give {}", any_of(names))
            }
        },
        ErrorKind::ValueValidation => {
            let (arg, value) = (arg?, one(ContextKind::InvalidValue)?);
            format!("{value:?} is no value of {arg}: {}", reason(error, value)?)
        }
        _ => return None,
    })
}

/// What a value's parser has against it.
fn reason(error: &Error, value: &str) -> Option<String> {
    let source = error.source()?;
    if source.is::<ParseIntError>() {
        return Some("give a whole number".to_owned());
    }
    let text = source.to_string();
    // clap's own words for numbers out of bounds.
    let bounds = text.strip_prefix(value).and_then(|text| text.strip_prefix(" is not in "));
    Some(match bounds.and_then(|bounds| bounds.split_once("..=")) {
        Some((least, most)) => format!("give {least} to {most}"),
        None => text,
    })
}

/// `a`, `a or b`, `a, b or c`.
fn any_of(names: &[impl AsRef<str>]) -> String {
    let names: Vec<_> = names.iter().map(AsRef::as_ref).collect();
    match names.as_slice() {
        [] => "another".to_owned(),
        [name] => (*name).to_owned(),
        [others @ .., last] => format!("{} or {last}", others.join(", ")),
    }
}

/// A missing argument, or the several of which one would do: `<--uuid <UUID>|--type <TYPE>>`.
fn ways(arg: &str) -> String {
    let group = arg.strip_prefix('<').and_then(|arg| arg.strip_suffix('>'));
    match group.filter(|group| group.contains('|')) {
        Some(group) => any_of(&group.split('|').collect::<Vec<_>>()),
        None => arg.to_owned(),
    }
}

/// The command that a usage line is about: all before its first argument.
fn command(error: &Error) -> Option<String> {
    let ContextValue::StyledStr(usage) = error.get(ContextKind::Usage)? else { return None };
    let usage = usage.to_string();
    let words = usage.strip_prefix("Usage:")?.lines().next()?.split_whitespace();
    let name: Vec<_> = words.take_while(|word| !word.starts_with(['-', '[', '<'])).collect();
    Some(name.join(" "))
}

/// clap's words for what has none here, without what stands around them.
fn clap_words(error: &Error) -> String {
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
        /// Starts one.
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
        /// Needs two.
        Copy { from: String, to: String },
    }

    fn said(line: &str) -> String {
        let words = std::iter::once("ctl").chain(line.split_whitespace());
        one_line(&Cli::try_parse_from(words).unwrap_err())
    }

    #[test]
    fn each_mistake_is_named_with_its_remedy() {
        for (line, words) in [
            ("strat", "There is no command \"strat\"; did you mean start?; see `ctl --help`"),
            ("start", "Give --uuid <UUID> or --kind <KIND>; see `ctl start --help`"),
            ("copy", "Give <FROM> and <TO>; see `ctl copy --help`"),
            ("copy a b c", "\"c\" is one word too many; see `ctl copy --help`"),
            ("start --kind a --cor 5", "There is no option --cor here; did you mean --core?"),
            (
                "start --uuid soft0",
                "\"soft0\" is no value of --uuid <UUID>: a uuid is 32 hexadecimal digits, as in \
                 83c32df7-d52e-4ec1-9668-1f3c7e4df107",
            ),
            ("start --kind a --core 101", "\"101\" is no value of --core <CORE>: give 1 to 100"),
            ("start --kind a --core x", "\"x\" is no value of --core <CORE>: give a whole number"),
            (
                "start --kind a --output xml",
                "\"xml\" is no value of --output <OUTPUT>: give text or json",
            ),
            ("start --kind", "--kind <KIND> needs a value"),
            ("start --kind a --kind b", "--kind <KIND> is given twice"),
            (
                "start --kind a --uuid 83c32df7-d52e-4ec1-9668-1f3c7e4df107",
                "--kind <KIND> does not go with --uuid <UUID>",
            ),
        ] {
            let said = said(line);
            assert!(said.contains(words), "{line}: {said}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_wrong_is_one_line(words in prop::collection::vec(
            prop_oneof![
                "start|copy|--uuid|--kind|--core|--output|--tcp|--tcp=|--core=|-x|--|-u",
                "[ -~]{0,8}",
                "\\PC{0,6}",
                "[a\n\t]{0,4}",
            ], 0..6)) {
            let words = std::iter::once("ctl".to_owned()).chain(words);
            if let Err(error) = Cli::try_parse_from(words) && !is_help(&error) {
                let said = one_line(&error);
                prop_assert!(!said.is_empty() && said.lines().count() == 1, "{said:?}");
            }
        }
    }
}
