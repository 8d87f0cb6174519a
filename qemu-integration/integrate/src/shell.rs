//! Quoting of arguments for a POSIX shell.

/// Returns an argument, quoted only if a shell would interpret it otherwise.
pub fn quote(arg: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@%+".contains(c);
    if !arg.is_empty() && arg.chars().all(plain) {
        return arg.to_owned();
    }
    format!("'{}'", arg.replace('\'', r"'\''"))
}

/// Formats arguments as a shell command with one line per option and its value.
pub fn lines(args: &[String]) -> String {
    let mut text = String::new();
    for (at, arg) in args.iter().enumerate() {
        // A word after an option counts as its value. This affects line breaks only.
        let value = at > 0 && args[at - 1].starts_with('-') && !arg.starts_with('-');
        match (at, value) {
            (0, _) => {}
            (_, true) => text.push(' '),
            (_, false) => text.push_str(" \\\n  "),
        }
        text.push_str(&quote(arg));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn only_special_arguments_are_quoted() {
        assert_eq!(quote("share=on,size=1G"), "share=on,size=1G");
        assert_eq!(quote(""), "''");
        assert_eq!(quote(r#"{"a":"b"}"#), r#"'{"a":"b"}'"#);
        assert_eq!(quote("it's"), r"'it'\''s'");
    }

    #[test]
    fn each_option_starts_a_line() {
        let args = words(&["qemu-system-x86_64", "-nographic", "-m", "1G", "disk.img"]);
        assert_eq!(lines(&args), "qemu-system-x86_64 \\\n  -nographic \\\n  -m 1G \\\n  disk.img");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn a_shell_reads_the_original_arguments(args in prop::collection::vec("[^\0]{0,12}", 1..5)) {
            let script = format!("printf '%s\\0' {}", lines(&args));
            let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
            let expected: Vec<u8> = args.iter().flat_map(|arg| [arg.as_bytes(), b"\0"].concat()).collect();
            prop_assert_eq!(output.stdout, expected);
        }
    }
}
