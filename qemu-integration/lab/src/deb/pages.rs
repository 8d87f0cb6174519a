//! Manual pages that pass mandoc: with a valid heading and without doubled blank lines.

/// Formats the page of this name (such as `vgpuctl-list`) and section from the program's output.
pub fn tidy(page: &str, name: &str, section: &str, date: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let title = name.to_uppercase().replace('-', "\\-");
    let lines = page.lines().map(|line| {
        if line.starts_with(".TH ") {
            format!(".TH \"{title}\" {section} {date} \"Tessera {version}\" \"Tessera\"\n")
        } else {
            format!("{line}\n")
        }
    });
    lines.collect::<String>().replace("\n.br\n\n.br\n", "\n.sp\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn heading_contains_page_and_release() {
        let page = ".TH vgpuctl-list 1  \"list \" \n.SH NAME\nFormat\n.br\n\n.br\nvalues\n";
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            super::tidy(page, "vgpuctl-list", "1", "2026-01-02"),
            format!(
                ".TH \"VGPUCTL\\-LIST\" 1 2026-01-02 \"Tessera {version}\" \"Tessera\"\n\
                 .SH NAME\nFormat\n.sp\nvalues\n"
            )
        );
    }
}
