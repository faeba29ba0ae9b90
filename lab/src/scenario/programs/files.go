// Serves files of /tmp, or gets one and says its checksum.
package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	if os.Args[1] == "serve" {
		panic(http.ListenAndServe(":8003", http.FileServer(http.Dir("/tmp"))))
	}
	answer, err := http.Get("http://" + os.Args[1] + ":8003/file")
	if err != nil {
		panic(err)
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, answer.Body); err != nil {
		panic(err)
	}
	fmt.Printf("%x  -\n", sum.Sum(nil))
}
