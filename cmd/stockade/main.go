// Command stockade is the server ("stockade serve") and every command a person
// types. "stockade --help" lists them.
package main

import (
	"context"
	"os"

	"github.com/stockade-run/stockade/internal/cli"
)

// version is set at link time.
var version = "dev"

func main() {
	os.Exit(cli.Main(context.Background(), cli.Env{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Version: version,
	}, os.Args[1:]))
}
