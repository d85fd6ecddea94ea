//! `moexpress completions` and `moexpress man`: what shells and `man` want to know, made from the arguments themselves.

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Cli;
use crate::failure::Failure;

/// The completions of a shell.
pub(crate) fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "moexpress", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The manual page, those of all subcommands behind it.
pub(crate) fn page() -> Result<String, Failure> {
    let mut command = Cli::command();
    command.build();
    let mut page = rendered(&command)?;
    for subcommand in command.get_subcommands().filter(|command| command.get_name() != "help" && !command.is_hide_set())
    {
        page += &rendered(subcommand)?;
    }
    Ok(page)
}

fn rendered(command: &Command) -> Result<String, Failure> {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page).map_err(Failure::failed)?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}
