//! Manual pages as mandoc wants them: with a heading that it understands, and no blank line made in two ways.

/// A page of this name (`vgpuctl-list`) and section, from what the program itself wrote.
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
    fn the_heading_says_which_page_of_which_release_this_is() {
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
