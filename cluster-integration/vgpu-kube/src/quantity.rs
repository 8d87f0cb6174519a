//! Quantities of Kubernetes: `1Gi`, `34`, `33500m`, `1e3`.

/// Error of a text that is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity of at least 0, such as 1Gi or 30")]
pub struct QuantityError(String);

/// Longest text of a quantity, in bytes.
const MAX_LEN: usize = 64;

/// Suffixes, with the factor as a fraction: numerator and denominator.
const SUFFIXES: [(&str, u128, u128); 16] = [
    ("Ki", 1 << 10, 1),
    ("Mi", 1 << 20, 1),
    ("Gi", 1 << 30, 1),
    ("Ti", 1 << 40, 1),
    ("Pi", 1 << 50, 1),
    ("Ei", 1 << 60, 1),
    ("n", 1, 1_000_000_000),
    ("u", 1, 1_000_000),
    ("m", 1, 1_000),
    ("k", 1_000, 1),
    ("M", 1_000_000, 1),
    ("G", 1_000_000_000, 1),
    ("T", 1_000_000_000_000, 1),
    ("P", 1_000_000_000_000_000, 1),
    ("E", 1_000_000_000_000_000_000, 1),
    ("", 1, 1),
];

/// Returns a quantity as a whole number, rounded up.
pub fn ceil(text: &str) -> Result<u64, QuantityError> {
    let parsed = (text.len() <= MAX_LEN).then(|| parse(text)).flatten();
    parsed.ok_or_else(|| QuantityError(text.chars().take(MAX_LEN).collect()))
}

fn parse(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (numerator, denominator) = factor(suffix)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    // Zeros at the end would only make the numbers larger.
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}");
    let digits: u128 = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let value = digits.checked_mul(numerator)?.div_ceil(denominator.checked_mul(scale)?);
    u64::try_from(value).ok()
}

fn factor(suffix: &str) -> Option<(u128, u128)> {
    if let Some((_, numerator, denominator)) = SUFFIXES.iter().find(|(name, ..)| *name == suffix) {
        return Some((*numerator, *denominator));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    let (negative, digits) = match exponent.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, exponent.strip_prefix('+').unwrap_or(exponent)),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let power = 10_u128.checked_pow(digits.parse().ok()?)?;
    Some(if negative { (1, power) } else { (power, 1) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_parsed_and_rounded_up() {
        for (text, value) in [
            ("0", 0),
            ("34", 34),
            ("33.5", 34),
            ("33.50", 34),
            ("33500m", 34),
            ("1m", 1),
            (".5", 1),
            ("5.", 5),
            ("1Gi", 1 << 30),
            ("1.25Gi", 1280 << 20),
            ("1000Mi", 1000 << 20),
            ("1G", 1_000_000_000),
            ("1e3", 1000),
            ("1E3", 1000),
            ("2E", 2_000_000_000_000_000_000),
            ("15e-1", 2),
            ("1073741824", 1 << 30),
        ] {
            assert_eq!(ceil(text), Ok(value), "{text}");
        }
        for text in [
            "",
            "-1",
            "+1",
            "1gi",
            "1 Gi",
            "Gi",
            ".",
            "1.2.3",
            "1e",
            "1e+",
            "1e99",
            "1Gib",
            "0x10",
            "99999999999999999999",
            "16Ei",
            "1\u{664}",
        ] {
            assert!(ceil(text).is_err(), "{text}");
        }
        let said = ceil("many").unwrap_err().to_string();
        assert_eq!(said, "\"many\" is not a quantity of at least 0, such as 1Gi or 30");
    }

    proptest! {
        #[test]
        fn any_text_is_a_number_or_an_error(text in "\\PC{0,80}") {
            let _ = ceil(&text);
        }

        #[test]
        fn all_spellings_of_a_number_are_equal(mebibytes in 0_u64..1 << 30) {
            let bytes = mebibytes << 20;
            for text in [
                bytes.to_string(),
                format!("{mebibytes}Mi"),
                format!("{}Ki", mebibytes << 10),
                format!("{bytes}e0"),
                format!("{bytes}000m"),
                format!("{bytes}.000"),
            ] {
                prop_assert_eq!(ceil(&text), Ok(bytes));
            }
            prop_assert_eq!(ceil(&format!("{bytes}.0001")), Ok(bytes + 1));
        }
    }
}
