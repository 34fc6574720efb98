// Command stockade is the server ("stockade serve") and every command a person
// types. "stockade --help" lists them.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stockade-run/stockade/internal/cli"
	"github.com/stockade-run/stockade/internal/osproc"
)

// version is set at link time.
var version = "dev"

func main() {
	if err := osproc.KeepInherited(); err != nil {
		fmt.Fprintln(os.Stderr, "stockade:", err)
		os.Exit(1)
	}
	os.Exit(cli.Main(context.Background(), cli.Env{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Version: version,
	}, os.Args[1:]))
}
