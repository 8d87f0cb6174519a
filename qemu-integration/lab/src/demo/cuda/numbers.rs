//! Numbers that CUDA programs print: results, times and rates.

use std::collections::BTreeMap;

/// End of the names of times of kernels, and of rates of copies. Other numbers are results.
pub const TIME: &str = "_ms";
const RATE: &str = "_gbs";

/// Numbers by their names, as a program prints them.
pub type Numbers = BTreeMap<String, f64>;

/// Reads lines of a name and a number.
pub fn numbers(text: &str) -> Numbers {
    let number = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    text.lines().filter_map(number).collect()
}

/// Reads lines of a name and a number, and separates results from times.
pub fn results_and_times(text: &str) -> (Numbers, Numbers) {
    let is_result = |name: &str| !name.ends_with(TIME) && !name.ends_with(RATE);
    let told = numbers(text).into_iter().filter(|(name, _)| name != "ready" && name != "exit");
    told.partition(|(name, _)| is_result(name))
}

/// Replaces numbers by better ones: by shorter times and higher rates.
pub fn keep_best(best: &mut Numbers, measured: Numbers) {
    for (name, number) in measured {
        let choose = if name.ends_with(TIME) { f64::min } else { f64::max };
        let kept = best.entry(name).or_insert(number);
        *kept = choose(*kept, number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_time_and_the_highest_rate_are_kept() {
        let mut best = numbers("kernel_ms 10.5\nup_gbs 50\n");
        keep_best(&mut best, numbers("kernel_ms 10\nup_gbs 49\ndown_gbs 51\n"));
        assert_eq!(best, numbers("kernel_ms 10\nup_gbs 50\ndown_gbs 51\n"));
    }
}
